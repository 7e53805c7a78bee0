// SPDX-License-Identifier: Apache-2.0

package server

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/gpufence/gpufence/enforcer/api"
)

var update = flag.Bool("update", false, "write docs/openapi.yaml as the handlers and types are")

const openapiFile = "../../../docs/openapi.yaml"

// TestOpenAPI: the document says of every path, body and field what the code says.
func TestOpenAPI(t *testing.T) {
	want := openapi(t)
	if *update {
		if err := os.WriteFile(openapiFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(openapiFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != string(want) {
		a, b := strings.Split(string(have), "\n"), strings.Split(string(want), "\n")
		for i := range min(len(a), len(b)) {
			if a[i] != b[i] {
				t.Fatalf("docs/openapi.yaml line %d is %q, and the code says %q: go test ./enforcer/api/server -run OpenAPI -update", i+1, a[i], b[i])
			}
		}
		t.Fatalf("docs/openapi.yaml has %d lines, the code makes %d: go test ./enforcer/api/server -run OpenAPI -update", len(a), len(b))
	}
	var doc map[string]any
	if err := yaml.Unmarshal(have, &doc); err != nil {
		t.Fatalf("docs/openapi.yaml is not YAML: %v", err)
	}
	paths, _ := doc["paths"].(map[string]any)
	if len(paths) != len(routes)+3 {
		t.Errorf("%d paths in the document, %d routes and 3 probes in the code", len(paths), len(routes))
	}
	// Every reference leads somewhere.
	components, _ := doc["components"].(map[string]any)
	schemas, _ := components["schemas"].(map[string]any)
	for _, line := range strings.Split(string(have), "\n") {
		if _, ref, ok := strings.Cut(line, "#/components/schemas/"); ok && schemas[strings.Trim(ref, `"'`)] == nil {
			t.Errorf("nothing is called %s", ref)
		}
	}
}

// Every path of the document is answered by a handler, and no other method is.
func TestOpenAPIPathsAreServed(t *testing.T) {
	_, sock := serve(t, applying{&fakeService{}}, -1)
	for _, path := range slices.Sorted(maps.Keys(routes)) {
		rt := routes[path]
		at := "/" + api.APIVersion + "/" + strings.Replace(path, "{id}", "x", 1)
		body := ""
		if rt.req != nil {
			body = "{}"
		}
		if st, e, _ := raw(t, sock, rt.method, at, body); st != 200 {
			t.Errorf("%s %s: %d %v", rt.method, at, st, e)
		}
		other := "POST"
		if rt.method == other {
			other = "GET"
		}
		if st, _, _ := raw(t, sock, other, at, ""); st != 405 {
			t.Errorf("%s %s: %d", other, at, st)
		}
	}
}

// openapi writes the document.
func openapi(t *testing.T) []byte {
	t.Helper()
	docs := comments(t, "..", "../../quota")
	g := &generator{docs: docs, schemas: map[string]any{}}
	paths := map[string]any{}
	failed := func(what string) map[string]any {
		return map[string]any{"description": what, "content": jsonOf(g.schema(reflect.TypeFor[api.Error]()))}
	}
	for path, rt := range routes {
		op := map[string]any{
			"summary":     rt.doc,
			"operationId": strings.NewReplacer("/{id}/", "-", "/{id}", "-one", "/", "-").Replace(path),
		}
		responses := map[string]any{
			"400": failed("the request cannot be understood"),
			"403": failed("the caller may not"),
			"405": failed("another method"),
			"422": failed("refused; the code and the sentence say why"),
			"500": failed("a fault"),
			"503": failed("too much to do, or quiesced"),
		}
		content := jsonOf(g.schema(reflect.TypeOf(rt.resp)))
		if path == "events" {
			content = map[string]any{"application/jsonl": content["application/json"]}
			op["parameters"] = []any{
				map[string]any{"name": "since", "in": "query", "description": "only events with a greater number", "schema": map[string]any{"type": "integer", "format": "int64", "minimum": 0}},
				map[string]any{"name": "follow", "in": "query", "description": "1: go on with new events; empty lines say that the stream stands", "schema": map[string]any{"type": "string", "enum": []string{"0", "1", "false", "true"}}},
			}
		}
		responses["200"] = map[string]any{"description": "done", "content": content}
		if strings.Contains(path, "{id}") {
			op["parameters"] = []any{map[string]any{
				"name": "id", "in": "path", "required": true, "schema": map[string]any{"type": "string"},
				"description": "an unambiguous beginning of the id, the container's name, the pod's name, or pod/container with %2F for the slash",
			}}
			responses["404"] = failed("no such container")
			responses["409"] = failed("the name fits several")
		}
		if rt.req != nil {
			op["requestBody"] = map[string]any{"required": true, "content": jsonOf(g.schema(reflect.TypeOf(rt.req)))}
			responses["413"] = failed(fmt.Sprintf("the body exceeds %d bytes", api.MaxRequestBytes))
		}
		access := "root and the group gpufence"
		if rt.change {
			access = "root"
		}
		op["description"] = "For " + access + "."
		op["responses"] = responses
		paths["/"+api.APIVersion+"/"+path] = map[string]any{strings.ToLower(rt.method): op}
	}
	health := func(what string) map[string]any {
		return map[string]any{"get": map[string]any{"summary": what, "responses": map[string]any{
			"200": map[string]any{"description": "yes", "content": jsonOf(g.schema(reflect.TypeFor[api.Health]()))},
			"503": map[string]any{"description": "no", "content": jsonOf(g.schema(reflect.TypeFor[api.Health]()))},
		}}}
	}
	paths[pathLive] = health("Whether sampling goes on.")
	paths[pathReady] = health("Whether containers with a GPU can start.")
	paths[pathMetrics] = map[string]any{"get": map[string]any{"summary": "Metrics for Prometheus; docs/metrics.md lists them.", "responses": map[string]any{
		"200": map[string]any{"description": "the text format", "content": map[string]any{"text/plain": map[string]any{"schema": map[string]any{"type": "string"}}}},
	}}}
	doc := map[string]any{
		"openapi": "3.1.0",
		"info": map[string]any{
			"title": "gpufenced", "version": api.APIVersion,
			"license":     map[string]any{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "HTTP/1.1 over the unix socket /run/gpufence/gpufenced.sock. Unknown fields are ignored, and fields are only added within a version.",
		},
		"servers":    []any{map[string]any{"url": "http://gpufenced", "description": "the host is not looked at: curl --unix-socket /run/gpufence/gpufenced.sock http://gpufenced/v1/version"}},
		"paths":      paths,
		"components": map[string]any{"schemas": g.schemas},
	}
	out, err := yaml.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return append([]byte("# SPDX-License-Identifier: Apache-2.0\n# Made from the handlers and types of enforcer/api, which a test compares: go test ./enforcer/api/server -run OpenAPI -update\n"), out...)
}

func jsonOf(schema any) map[string]any {
	return map[string]any{"application/json": map[string]any{"schema": schema}}
}

type generator struct {
	docs    map[string]string // by Type and Type.Field
	schemas map[string]any
}

// schema is the schema of a type; structs with a name go to the components.
func (g *generator) schema(t reflect.Type) map[string]any {
	switch {
	case t == reflect.TypeFor[time.Time]():
		return map[string]any{"type": "string", "format": "date-time"}
	case t.Kind() == reflect.Pointer:
		return g.schema(t.Elem())
	case t.Kind() == reflect.Slice:
		return map[string]any{"type": "array", "items": g.schema(t.Elem())}
	case t.Kind() == reflect.Map:
		return map[string]any{"type": "object", "additionalProperties": g.schema(t.Elem())}
	case t.Kind() == reflect.String:
		return map[string]any{"type": "string"}
	case t.Kind() == reflect.Bool:
		return map[string]any{"type": "boolean"}
	case t.Kind() == reflect.Int, t.Kind() == reflect.Int64:
		return map[string]any{"type": "integer", "format": "int64"}
	case t.Kind() == reflect.Uint64:
		return map[string]any{"type": "integer", "format": "uint64", "minimum": 0}
	case t.Kind() == reflect.Float64:
		return map[string]any{"type": "number"}
	case t.Kind() != reflect.Struct:
		panic("the protocol has a " + t.String())
	case t.Name() == "":
		return map[string]any{"type": "object"}
	}
	name := t.Name()
	ref := map[string]any{"$ref": "#/components/schemas/" + name}
	if _, done := g.schemas[name]; done {
		return ref
	}
	g.schemas[name] = nil // a type may lead to itself
	properties, required := map[string]any{}, []string{}
	g.fields(t, properties, &required)
	s := map[string]any{"type": "object", "properties": properties}
	if d := g.docs[name]; d != "" {
		s["description"] = d
	}
	if len(required) > 0 {
		slices.Sort(required)
		s["required"] = required
	}
	g.schemas[name] = s
	return ref
}

func (g *generator) fields(t reflect.Type, properties map[string]any, required *[]string) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag := f.Tag.Get("json")
		if f.Anonymous && tag == "" {
			g.fields(f.Type, properties, required)
			continue
		}
		name, options, _ := strings.Cut(tag, ",")
		if name == "-" || !f.IsExported() {
			continue
		}
		if name == "" {
			panic(fmt.Sprintf("%s.%s has no name in JSON", t, f.Name))
		}
		s := g.schema(f.Type)
		if d := g.docs[t.Name()+"."+f.Name]; d != "" {
			if s["$ref"] != nil {
				s = map[string]any{"allOf": []any{s}}
			}
			s["description"] = d
		}
		properties[name] = s
		if !strings.Contains(options, "omit") {
			*required = append(*required, name)
		}
	}
}

// comments reads what the source says of types and fields.
func comments(t *testing.T, dirs ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				d, ok := n.(*ast.GenDecl)
				if !ok {
					return true
				}
				for _, spec := range d.Specs {
					ts, ok := spec.(*ast.TypeSpec)
					if !ok {
						continue
					}
					doc := ts.Doc
					if doc == nil {
						doc = d.Doc
					}
					out[ts.Name.Name] = sentence(doc)
					st, ok := ts.Type.(*ast.StructType)
					if !ok {
						continue
					}
					for _, field := range st.Fields.List {
						for _, name := range field.Names {
							out[ts.Name.Name+"."+name.Name] = strings.TrimSpace(sentence(field.Doc) + " " + sentence(field.Comment))
						}
					}
				}
				return true
			})
		}
	}
	return out
}

func sentence(c *ast.CommentGroup) string {
	return strings.NewReplacer("[", "", "]", "").Replace(strings.Join(strings.Fields(c.Text()), " "))
}
