// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/ext"
	admission "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"
)

// costLimit is what the API server lets one expression cost.
const costLimit = 1_000_000

// quantity is the API server's type of that name, as far as the policies use it.
type quantity struct{ resource.Quantity }

var quantityType = cel.OpaqueType("kubernetes.Quantity")

func (q quantity) ConvertToNative(reflect.Type) (any, error) { return nil, errors.New("not needed") }
func (q quantity) ConvertToType(ref.Type) ref.Val            { return types.NewErr("not needed") }
func (q quantity) Equal(ref.Val) ref.Val                     { return types.NewErr("not needed") }
func (q quantity) Type() ref.Type                            { return quantityType }
func (q quantity) Value() any                                { return q.Quantity }

func celEnv(t *testing.T) *cel.Env {
	t.Helper()
	text := func(v ref.Val) string { s, _ := v.Value().(string); return s }
	env, err := cel.NewEnv(
		cel.HomogeneousAggregateLiterals(), cel.EagerlyValidateDeclarations(true), cel.DefaultUTCTimeZone(true), cel.CrossTypeNumericComparisons(true),
		cel.OptionalTypes(), ext.Strings(ext.StringsVersion(2)),
		cel.Variable("object", cel.DynType), cel.Variable("oldObject", cel.DynType), cel.Variable("request", cel.DynType), cel.Variable("variables", cel.DynType),
		cel.Function("isQuantity", cel.Overload("is_quantity_string", []*cel.Type{cel.StringType}, cel.BoolType, cel.UnaryBinding(func(v ref.Val) ref.Val {
			_, err := resource.ParseQuantity(text(v))
			return types.Bool(err == nil)
		}))),
		cel.Function("quantity", cel.Overload("string_to_quantity", []*cel.Type{cel.StringType}, quantityType, cel.UnaryBinding(func(v ref.Val) ref.Val {
			q, err := resource.ParseQuantity(text(v))
			if err != nil {
				return types.WrapErr(err)
			}
			return quantity{q}
		}))),
		cel.Function("isGreaterThan", cel.MemberOverload("quantity_is_greater_than", []*cel.Type{quantityType, quantityType}, cel.BoolType, cel.BinaryBinding(func(a, b ref.Val) ref.Val {
			x, okx := a.(quantity)
			y, oky := b.(quantity)
			if !okx || !oky {
				return types.NewErr("no quantities")
			}
			return types.Bool(x.Cmp(y.Quantity) > 0)
		}))),
	)
	if err != nil {
		t.Fatal(err)
	}
	return env
}

// policy is a ValidatingAdmissionPolicy whose expressions are compiled.
type policy struct {
	conditions, variables []named
	validations           []validation
}

type named struct {
	name    string
	program cel.Program
}

type validation struct {
	expression, message cel.Program
	text                string
}

// loadPolicy reads a policy out of a file of packaging/kubernetes.
func loadPolicy(t *testing.T, file, name string) policy {
	t.Helper()
	text, err := os.ReadFile("../../packaging/kubernetes/" + file)
	if err != nil {
		t.Fatal(err)
	}
	env := celEnv(t)
	compile := func(expression string) cel.Program {
		t.Helper()
		ast, issues := env.Compile(expression)
		if issues.Err() != nil {
			t.Fatalf("%s of %s: %v", name, file, issues.Err())
		}
		program, err := env.Program(ast, cel.CostLimit(costLimit), cel.EvalOptions(cel.OptOptimize, cel.OptTrackCost))
		if err != nil {
			t.Fatalf("%s of %s: %v", name, file, err)
		}
		return program
	}
	for _, doc := range strings.Split(string(text), "\n---\n") {
		var p admission.ValidatingAdmissionPolicy
		if err := yaml.Unmarshal([]byte(doc), &p); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if p.Kind != "ValidatingAdmissionPolicy" || p.Name != name {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(doc), &p); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		var out policy
		for _, c := range p.Spec.MatchConditions {
			out.conditions = append(out.conditions, named{c.Name, compile(c.Expression)})
		}
		for _, v := range p.Spec.Variables {
			out.variables = append(out.variables, named{v.Name, compile(v.Expression)})
		}
		for _, v := range p.Spec.Validations {
			val := validation{expression: compile(v.Expression), text: v.Message}
			if v.MessageExpression != "" {
				val.message = compile(v.MessageExpression)
			}
			out.validations = append(out.validations, val)
		}
		return out
	}
	t.Fatalf("no policy %s in %s", name, file)
	return policy{}
}

// input is what the API server hands a policy.
type input struct {
	object, old map[string]any
	operation   string
	request     map[string]any
}

// review is the API server's part: the first message of a denial, or "" if it is let through.
func (p policy) review(in input) (string, error) {
	request := map[string]any{"operation": in.operation}
	for k, v := range in.request {
		request[k] = v
	}
	variables := map[string]any{}
	activation := map[string]any{"object": in.object, "oldObject": in.old, "request": request, "variables": variables}
	for _, c := range p.conditions {
		v, _, err := c.program.Eval(activation)
		if err != nil {
			return "", fmt.Errorf("condition %s: %w", c.name, err)
		}
		if v != types.True {
			return "", nil
		}
	}
	for _, va := range p.variables {
		v, _, err := va.program.Eval(activation)
		if err != nil {
			return "", fmt.Errorf("variable %s: %w", va.name, err)
		}
		variables[va.name] = v
	}
	for i, val := range p.validations {
		v, _, err := val.expression.Eval(activation)
		if err != nil {
			return "", fmt.Errorf("validation %d: %w", i, err)
		}
		if v == types.True {
			continue
		}
		if val.message == nil {
			return val.text, nil
		}
		m, _, err := val.message.Eval(activation)
		if err != nil {
			return "", fmt.Errorf("message of validation %d: %w", i, err)
		}
		text, ok := m.Value().(string)
		if !ok || strings.TrimSpace(text) == "" || strings.Contains(text, "\n") {
			return "", fmt.Errorf("message of validation %d: %v, which the API server does not show", i, m)
		}
		return text, nil
	}
	return "", nil
}

// podObject is a pod with a GPU container, one without, and an init container.
func podObject(annotations map[string]string, change func(spec map[string]any)) map[string]any {
	spec := map[string]any{
		"containers": []any{
			map[string]any{"name": "main", "resources": map[string]any{"limits": map[string]any{"nvidia.com/gpu": "1"}}},
			map[string]any{"name": "sidecar"},
		},
		"initContainers": []any{map[string]any{"name": "setup"}},
	}
	if change != nil {
		change(spec)
	}
	metadata := map[string]any{"name": "p", "namespace": "team-a"}
	if annotations != nil {
		a := map[string]any{}
		for k, v := range annotations {
			a[k] = v
		}
		metadata["annotations"] = a
	}
	return map[string]any{"metadata": metadata, "spec": spec}
}

var podContainers = []string{"main", "sidecar", "setup"}

func codesOf(s string) []string {
	var out []string
	for _, w := range strings.Fields(s) {
		if len(w) == 5 && w[0] == 'E' && strings.Trim(w[1:], "0123456789") == "" {
			out = append(out, w)
		}
	}
	return slices.Compact(out)
}
