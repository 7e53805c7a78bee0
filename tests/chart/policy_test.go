// SPDX-License-Identifier: Apache-2.0

// Package chart tests what the chart and packaging/kubernetes hold without a cluster: that the CEL of
// the admission policies says what enforcer/quota says on the nodes, that the rules around it let
// through and stop what they should, and that every example is right. tests/chart/render runs helm,
// tests/k8s a real API server.
package chart

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// nodeOnly are what CEL cannot say, or only the node knows; docs/kubernetes-policy.md lists them.
var nodeOnly = []quota.Code{
	quota.CodeNotEnforced,   // depends on the node's version
	quota.CodeFraction,      // needs exact arithmetic
	quota.CodeTooBig,        // numbers; lengths are checked
	quota.CodeBelowContext,  // depends on the GPU
	quota.CodeAboveGPU,      // as well
	quota.CodeMinAboveMax,   // shares depend on the GPU
	quota.CodeBadConfigYAML, // CEL has no YAML
	quota.CodeContainerKeyNoGPU,
	quota.CodeNotAccepted, // node policy
}

// node is the verdict of a node that accepts every key and has a GPU of 80 GiB.
func node(annotations map[string]string, ceiling string) error {
	if err := quota.CheckNames(annotations, podContainers); err != nil {
		return err
	}
	p := quota.DefaultPolicy()
	accept := p.Accept[quota.EngineCRI]
	accept.GPU = true
	p.Accept[quota.EngineCRI] = accept
	p.Default[quota.EngineCRI] = quota.Default{Kind: quota.DefaultUnlimited}
	if ceiling != "" {
		c, err := quota.ParseAmount(ceiling, true)
		if err != nil {
			return err
		}
		p.Ceiling = c
	}
	r, _, err := quota.Parse(quota.Subject{Engine: quota.EngineCRI, Namespace: "team-a", Pod: "p", Container: "main", Annotations: annotations, HasGPU: true}, p)
	if err != nil || ceiling == "" {
		return err
	}
	_, _, err = r.Resolve([]quota.GPU{{UUID: "GPU-0a", TotalBytes: 80 << 30, AllocatableBytes: 78 << 30, ContextBytes: 1 << 20}}, p)
	return err
}

type row struct {
	annotations string // k=v|k=v, keys without the domain
	lax         bool   // CEL lets it through, the node does not
}

func (r row) parse() map[string]string {
	out := map[string]string{}
	for item := range strings.SplitSeq(r.annotations, "|") {
		k, v, _ := strings.Cut(item, "=")
		out[quota.Domain+k] = v
	}
	return out
}

var rows = []row{
	// right
	{annotations: "memory.max=4Gi"}, {annotations: "memory.max= 4Gi "}, {annotations: "memory.max=max"}, {annotations: "memory.max=25%"}, {annotations: "memory.max=25 %"},
	{annotations: "memory.max=+4Gi"}, {annotations: "memory.max=4.5Gi"}, {annotations: "memory.max=.5Gi"}, {annotations: "memory.max=4.Gi"}, {annotations: "memory.max=0"},
	{annotations: "memory.max=0.0"}, {annotations: "memory.max=4000M"}, {annotations: "memory.max=4194304k"}, {annotations: "memory.max=100%"}, {annotations: "memory.max=0.5%"},
	{annotations: "memory.max=0100.0%"}, {annotations: "memory.max=33.3333333%"},
	{annotations: "memory.max=4Gi|memory.min=1Gi|memory.high=3Gi|memory.swap.max=1Gi|memory.oom.group=false|require=reactive"},
	{annotations: "container.main.memory.max=4Gi"}, {annotations: "container.setup.memory.max=4Gi"},
	{annotations: "memory.max=GPU-0a=4Gi"}, {annotations: "memory.max=GPU-0a=4Gi, MIG-1b = 25%"}, {annotations: "memory.max=MIG-GPU-0a/1/2=max"},
	{annotations: "x-mine=anything"}, {annotations: "x-mine=1|memory.max=4Gi"}, {annotations: "config=pod: {memory.max: 4Gi}"},
	{annotations: "gpu=any"}, {annotations: "gpu=2"}, {annotations: "gpu=127"}, {annotations: "gpu=all"}, {annotations: "gpu=GPU-0a,GPU-0b"},
	{annotations: "compute.weight=1"}, {annotations: "compute.weight=10000"}, {annotations: "compute.weight=00100"}, {annotations: "compute.max=30%"}, {annotations: "require=hard"},
	// E1201 to E1209
	{annotations: "memory.max=4096"}, {annotations: "memory.max=1e9"}, {annotations: "memory.max=4g"}, {annotations: "memory.max=3000m"}, {annotations: "memory.max=4GB"},
	{annotations: "memory.max=4gib"}, {annotations: "memory.max=-4Gi"}, {annotations: "memory.max="}, {annotations: "memory.max=lots"}, {annotations: "memory.max=MAX"},
	{annotations: "memory.max=1.2.3Gi"}, {annotations: "memory.max=.Gi"}, {annotations: "memory.max=1/4"}, {annotations: "memory.max=101%"}, {annotations: "memory.max=100.1%"},
	{annotations: "memory.max=-5%"}, {annotations: "memory.max=%"}, {annotations: "memory.max=0=4Gi"}, {annotations: "memory.max=GPU-0a=4Gi,5Gi"}, {annotations: "memory.max=GPU-0a=4096"},
	{annotations: "memory.max=GPU-0a=4Gi,GPU-0A=5Gi"}, {annotations: "memory.max=GPU-0a=4Gi,"}, {annotations: "memory.max=foo=4Gi"}, {annotations: "memory.max=4Gi 5Gi"},
	{annotations: "memory.min=1"}, {annotations: "memory.high=1"}, {annotations: "memory.swap.max=x"}, {annotations: "container.main.memory.swap.max=5"},
	{annotations: "memory.max=" + strings.Repeat("9", 4097)}, {annotations: "x-long=" + strings.Repeat("9", 4097)},
	{annotations: "memory.max=12.123456789%", lax: true},
	{annotations: "memory.max=1.0001Ki"}, {annotations: "memory.max=9999999999Gi"},
	// words
	{annotations: "memory.oom.group=yes"}, {annotations: "memory.oom.group=True"}, {annotations: "container.main.memory.oom.group=1"}, {annotations: "require=advisory"},
	{annotations: "require="}, {annotations: "compute.weight=0"}, {annotations: "compute.weight=10001"}, {annotations: "compute.weight=-1"}, {annotations: "compute.max=0%"},
	{annotations: "compute.max=30"}, {annotations: "compute.max=101%"}, {annotations: "gpu=0"}, {annotations: "gpu=128"}, {annotations: "gpu=01"}, {annotations: "gpu=0,1"}, {annotations: "gpu="},
	{annotations: "gpu=GPU-0a,GPU-0a", lax: true},
	// keys
	{annotations: "memory.maximum=4Gi"}, {annotations: "memory_max=4Gi"}, {annotations: "max=4Gi"}, {annotations: "container.main=4Gi"}, {annotations: "container.main.memory=4Gi"},
	{annotations: "container..memory.max=4Gi"}, {annotations: "container.main.config=x"}, {annotations: "status=1"}, {annotations: "status.level=hard"}, {annotations: "statuses=1"},
	{annotations: "container.mian.memory.max=4Gi"}, {annotations: "container.other.gpu=any"}, {annotations: "memory.max.container.main=4Gi"}, {annotations: "Memory.max=4Gi"},
	{annotations: "config=pod: {memory.maxx: 4Gi}", lax: true}, {annotations: "config=[]"}, {annotations: "config=" + strings.Repeat("#", 65537)},
	{annotations: "config=pod: {memory.max: 4Gi}|memory.max=4Gi", lax: true},
	{annotations: "config=containers: {mian: {memory.max: 4Gi}}", lax: true},
}

func (r row) compare(t interface{ Errorf(string, ...any) }, p policy, ceiling string) {
	annotations := r.parse()
	onNode := node(annotations, ceiling)
	atApply, err := p.review(input{object: podObject(annotations, nil), old: map[string]any{}, operation: "CREATE"})
	short := r.annotations[:min(len(r.annotations), 80)]
	switch {
	case err != nil:
		t.Errorf("%q: %v", short, err)
	case onNode == nil && atApply != "":
		t.Errorf("%q is right for the node and refused at apply: %s", short, atApply)
	case ceiling != "" && strings.Contains(r.annotations, "%") && errors.Is(onNode, quota.CodeAboveCeiling) && atApply == "":
		// What a share comes to depends on the GPU.
	case onNode != nil && atApply == "" && !r.lax && !slices.Contains(nodeOnly, quota.CodeOf(onNode)):
		t.Errorf("%q passes at apply, and the node says %v", short, onNode)
	case onNode != nil && atApply != "" && r.lax:
		t.Errorf("%q is refused at apply (%s): it is not lax any more", short, atApply)
	case onNode != nil && atApply != "":
		if len(codesOf(atApply)) != 1 || !strings.HasPrefix(atApply, "gpufence: E1") {
			t.Errorf("%q: the message has no code: %s", short, atApply)
		}
	}
}

func TestPolicySaysWhatTheNodeSays(t *testing.T) {
	pods, ceiled := loadPolicy(t, "gpufence.yaml", "gpufence-pods"), loadPolicy(t, "policies-ceiling.yaml", "gpufence-pods")
	refused := 0
	for _, r := range rows {
		r.compare(t, pods, "")
		r.compare(t, ceiled, "40Gi")
		if node(r.parse(), "") != nil {
			refused++
		}
	}
	if refused < 50 || len(rows)-refused < 30 {
		t.Errorf("%d wrong rows of %d", refused, len(rows))
	}
}

// The same codes, where the two see the same.
func TestPolicyCodes(t *testing.T) {
	p := loadPolicy(t, "gpufence.yaml", "gpufence-pods")
	for annotations, want := range map[string]string{
		"memory.max=4096":               `gpufence: E1203 memory.max "4096" has no unit: write 4096Mi`,
		"memory.max=3000m":              `gpufence: E1202 memory.max "3000m" has an unknown unit: write 3000Mi`,
		"memory.max=4g":                 `gpufence: E1202 memory.max "4g" has an unknown unit: write 4Gi`,
		"memory.max=-4Gi":               `gpufence: E1205 memory.max "-4Gi" is negative: write a quantity such as 4Gi`,
		"memory.max=0=4Gi":              `gpufence: E1209 memory.max names a GPU by position, which means nothing under Kubernetes: write one amount for all GPUs, or UUIDs such as GPU-<uuid>=4Gi`,
		"memory.max=lots":               `gpufence: E1201 memory.max "lots" is not an amount: write one such as 4Gi, 25% or max`,
		"container.mian.memory.max=4Gi": `gpufence: E1312 gpufence.dev/container.mian.memory.max names a container that the pod does not have: its containers are main, sidecar, setup`,
		"status.level=hard":             `gpufence: E1304 gpufence.dev/status.level cannot be set, it is where gpufence reports: remove it`,
		"memory.oom.group=yes":          `gpufence: E1215 memory.oom.group is neither true nor false: write true or false`,
	} {
		got, err := p.review(input{object: podObject(row{annotations: annotations}.parse(), nil), operation: "CREATE"})
		if err != nil || got != want {
			t.Errorf("%s: %v\n got %s\nwant %s", annotations, err, got, want)
		}
		if code := quota.CodeOf(node(row{annotations: annotations}.parse(), "")); !strings.Contains(want, string(code)) {
			t.Errorf("%s: the node says %s", annotations, code)
		}
	}
}

// TestPolicyOnAnyValue compares the two on values that nobody thought of.
func TestPolicyOnAnyValue(t *testing.T) {
	p := loadPolicy(t, "gpufence.yaml", "gpufence-pods")
	piece := rapid.SampledFrom([]string{"0", "1", "9", "42", "100", ".", "+", "-", "Ki", "Mi", "Gi", "k", "M", "G", "m", "g", "%", "max", "=", ",", "GPU-", "MIG-", "0a", " ", "\t", "e", "/", "é"})
	keys := []string{quota.KeyMemoryMax, quota.KeyMemoryMin, quota.KeyMemorySwapMax, quota.KeyGPU, quota.KeyComputeWeight, quota.KeyComputeMax, quota.KeyRequire, quota.KeyOOMGroup}
	rapid.Check(t, func(t *rapid.T) {
		value := strings.Join(rapid.SliceOfN(piece, 0, 6).Draw(t, "value"), "")
		key := rapid.SampledFrom(keys).Draw(t, "key")
		r := row{annotations: key + "=" + value}
		// The exceptions that the table names: too many digits of a percentage, one GPU twice.
		r.lax = strings.Contains(value, "%") && strings.Contains(value, ".") || key == quota.KeyGPU && strings.Contains(value, ",")
		annotations := r.parse()
		onNode := node(annotations, "")
		atApply, err := p.review(input{object: podObject(annotations, nil), operation: "CREATE"})
		switch {
		case err != nil:
			t.Fatalf("%q: %v", r.annotations, err)
		case onNode == nil && atApply != "":
			t.Fatalf("%q is right for the node and refused at apply: %s", r.annotations, atApply)
		case onNode != nil && atApply == "" && !r.lax && !slices.Contains(nodeOnly, quota.CodeOf(onNode)):
			t.Fatalf("%q passes at apply, and the node says %v", r.annotations, onNode)
		}
	})
}

func TestCeiling(t *testing.T) {
	p := loadPolicy(t, "policies-ceiling.yaml", "gpufence-pods")
	for _, c := range []struct {
		annotations, code string
	}{
		{"memory.max=40Gi", ""}, {"memory.max=41Gi", "E1213"}, {"memory.max=max", "E1405"}, {"memory.max=50%", ""}, {"memory.min=41Gi|memory.max=40Gi", ""},
		{"container.main.memory.max=41Gi", "E1213"}, {"memory.max=max|container.main.memory.max=4Gi", ""}, {"memory.max=GPU-0a=41Gi", "E1213"},
		{"memory.max=GPU-0a=4Gi,GPU-0b=99999Mi", "E1213"}, {"memory.max=GPU-0a=max", "E1405"}, {"memory.high=99Gi|memory.max=1Gi", ""}, {"memory.swap.max=99Gi|memory.max=1Gi", ""},
		{"memory.max=+41Gi", "E1213"}, {"memory.max=42949672961k", "E1213"}, {"memory.max=41.Gi", "E1213"},
	} {
		got, err := p.review(input{object: podObject(row{annotations: c.annotations}.parse(), nil), operation: "CREATE"})
		if err != nil || strings.Join(codesOf(got), " ") != c.code {
			t.Errorf("%s: %q, %v, want %s", c.annotations, got, err, c.code)
		}
	}
}

// An update is looked at where it changes what is ours, and is not refused for what was there before.
func TestUpdates(t *testing.T) {
	p := loadPolicy(t, "gpufence.yaml", "gpufence-pods")
	wrong, right := map[string]string{"gpufence.dev/memory.max": "4096"}, map[string]string{"gpufence.dev/memory.max": "4Gi"}
	both := maps.Clone(wrong)
	both["other"] = "1"
	for name, c := range map[string]struct {
		old, now map[string]string
		refused  bool
	}{
		"to wrong":        {right, wrong, true},
		"from nothing":    {nil, wrong, true},
		"to right":        {wrong, right, false},
		"something else":  {wrong, both, false},
		"taken away":      {wrong, nil, false},
		"a second, wrong": {right, map[string]string{"gpufence.dev/memory.max": "4Gi", "gpufence.dev/memory.min": "5"}, true},
	} {
		got, err := p.review(input{object: podObject(c.now, nil), old: podObject(c.old, nil), operation: "UPDATE"})
		if err != nil || (got != "") != c.refused {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// The policies of workloads look into the template.
func TestWorkloads(t *testing.T) {
	for policyName, wrap := range map[string]func(any) map[string]any{
		"gpufence-workloads": func(template any) map[string]any { return map[string]any{"spec": map[string]any{"template": template}} },
		"gpufence-cronjobs": func(template any) map[string]any {
			return map[string]any{"spec": map[string]any{"jobTemplate": map[string]any{"spec": map[string]any{"template": template}}}}
		},
	} {
		p := loadPolicy(t, "gpufence.yaml", policyName)
		for value, code := range map[string]string{"4Gi": "", "4096": "E1203"} {
			template := podObject(map[string]string{"gpufence.dev/memory.max": value}, nil)
			for operation, old := range map[string]map[string]any{"CREATE": {}, "UPDATE": wrap(podObject(nil, nil))} {
				got, err := p.review(input{object: wrap(template), old: old, operation: operation})
				if err != nil || strings.Join(codesOf(got), " ") != code {
					t.Errorf("%s, %s of %s: %q, %v", policyName, operation, value, got, err)
				}
			}
		}
		bare := podObject(nil, nil)
		delete(bare, "metadata")
		if got, err := p.review(input{object: wrap(bare), old: wrap(bare), operation: "UPDATE"}); err != nil || got != "" {
			t.Errorf("%s without metadata: %q, %v", policyName, got, err)
		}
	}
}

func class(name string) func(map[string]any) {
	return func(spec map[string]any) { spec["runtimeClassName"] = name }
}

func TestClasses(t *testing.T) {
	ours := map[string]string{"gpufence.dev/memory.max": "4Gi"}
	noGPU := func(spec map[string]any) { spec["containers"] = []any{map[string]any{"name": "main"}} }
	hard := map[string]string{"gpufence.dev/require": "hard"}
	for _, c := range []struct {
		file, policy string
		pod          map[string]any
		refused      bool
	}{
		{"gpufence.yaml", "gpufence-no-class", podObject(ours, nil), true},
		{"gpufence.yaml", "gpufence-no-class", podObject(ours, class("gpufence")), false},
		{"gpufence.yaml", "gpufence-no-class", podObject(ours, class("gpufence-hard")), false},
		{"gpufence.yaml", "gpufence-no-class", podObject(nil, nil), false},
		{"gpufence.yaml", "gpufence-hard", podObject(ours, class("gpufence-hard")), true},
		{"gpufence.yaml", "gpufence-hard", podObject(hard, class("gpufence-hard")), false},
		{"gpufence.yaml", "gpufence-hard", podObject(ours, class("gpufence")), false},
		{"policies-namespace.yaml", "gpufence-require-class", podObject(nil, nil), true},
		{"policies-namespace.yaml", "gpufence-require-class", podObject(nil, class("gpufence")), false},
		{"policies-namespace.yaml", "gpufence-require-class", podObject(nil, class("nvidia")), true},
		{"policies-namespace.yaml", "gpufence-require-class", podObject(nil, noGPU), false},
		{"policies-cluster.yaml", "gpufence-require-class", podObject(ours, noGPU), true},
	} {
		got, err := loadPolicy(t, c.file, c.policy).review(input{object: c.pod, operation: "CREATE"})
		if err != nil || (got != "") != c.refused {
			t.Errorf("%s %v: %q, %v, want refused %v", c.policy, c.pod, got, err, c.refused)
		}
	}
}

func TestAgentIsHeldToItsNode(t *testing.T) {
	p := loadPolicy(t, "gpufence.yaml", "gpufence-agent")
	node := func(name string, labels map[string]any, unschedulable bool) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": name, "labels": labels}, "spec": map[string]any{"unschedulable": unschedulable}}
	}
	pod := func(on string) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": "p"}, "spec": map[string]any{"nodeName": on}}
	}
	ready, none := map[string]any{"a": "1", "gpufence.dev/ready": "true"}, map[string]any{"a": "1"}
	with := func(o map[string]any, field string, value any) map[string]any {
		o["metadata"].(map[string]any)[field] = value
		return o
	}
	raised := map[string]any{"gpufence.dev/memory.max": "max"}
	for name, c := range map[string]struct {
		resource    string
		now, old    map[string]any
		user, token string
		refused     bool
	}{
		"its node":          {"nodes", node("n1", ready, false), node("n1", none, false), "gpufence-agent", "n1", false},
		"takes it off":      {"nodes", node("n1", none, false), node("n1", ready, false), "gpufence-agent", "n1", false},
		"another node":      {"nodes", node("n2", ready, false), node("n2", none, false), "gpufence-agent", "n1", true},
		"no node in token":  {"nodes", node("n1", ready, false), node("n1", none, false), "gpufence-agent", "", true},
		"another label":     {"nodes", node("n1", map[string]any{"a": "2"}, false), node("n1", none, false), "gpufence-agent", "n1", true},
		"adds a label":      {"nodes", node("n1", map[string]any{"a": "1", "b": "1"}, false), node("n1", none, false), "gpufence-agent", "n1", true},
		"a label less":      {"nodes", node("n1", map[string]any{}, false), node("n1", none, false), "gpufence-agent", "n1", true},
		"the spec":          {"nodes", node("n1", none, true), node("n1", none, false), "gpufence-agent", "n1", true},
		"a pod of its node": {"pods", pod("n1"), pod("n1"), "gpufence-agent", "n1", false},
		"a pod elsewhere":   {"pods", pod("n2"), pod("n2"), "gpufence-agent", "n1", true},
		"a pod's limit":     {"pods", with(pod("n1"), "annotations", raised), pod("n1"), "gpufence-agent", "n1", true},
		"as it was":         {"pods", with(pod("n1"), "annotations", raised), with(pod("n1"), "annotations", raised), "gpufence-agent", "n1", false},
		"a pod's labels":    {"pods", with(pod("n1"), "labels", map[string]any{"app": "web"}), pod("n1"), "gpufence-agent", "n1", true},
		"its annotations":   {"nodes", with(node("n1", none, false), "annotations", map[string]any{"cni": "x"}), node("n1", none, false), "gpufence-agent", "n1", true},
		"a finalizer":       {"nodes", with(node("n1", none, false), "finalizers", []any{"x"}), node("n1", none, false), "gpufence-agent", "n1", true},
		"somebody else":     {"nodes", node("n2", none, true), node("n2", ready, false), "admin", "", false},
	} {
		user := map[string]any{"username": "system:serviceaccount:gpufence:" + c.user}
		if c.token != "" {
			user["extra"] = map[string]any{"authentication.kubernetes.io/node-name": []any{c.token}}
		}
		got, err := p.review(input{object: c.now, old: c.old, operation: "UPDATE", request: map[string]any{"userInfo": user, "resource": map[string]any{"resource": c.resource}}})
		if err != nil || (got != "") != c.refused {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
