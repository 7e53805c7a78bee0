// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpufence/gpufence/enforcer/quota"
)

const packaged = "../../packaging/config.toml"

func read1(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// uncommented takes the "#" off every setting, and counts the keys.
func uncommented(text string) (string, int) {
	n := 0
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "# ") && line != "#" {
			line = line[1:]
			if !strings.HasPrefix(line, "[") {
				n++
			}
		}
		out = append(out, line)
	}
	return strings.Join(out, "\n"), n
}

func TestPackagedFileHasEveryKeyAtItsDefault(t *testing.T) {
	text := read1(t, packaged)
	as, err := Parse(packaged, []byte(text))
	if err != nil {
		t.Fatalf("the file as it is: %v", err)
	}
	if d := cmp.Diff(Default(), as); d != "" {
		t.Errorf("the file as it is differs from the defaults:\n%s", d)
	}
	plain, keys := uncommented(text)
	got, err := Parse(packaged, []byte(plain))
	if err != nil {
		t.Fatalf("uncommented: %v", err)
	}
	// A ceiling of max says the same as none.
	if got.Policy.Ceiling.Kind != quota.KindUnlimited {
		t.Errorf("ceiling %v, want max", got.Policy.Ceiling)
	}
	got.Policy.Ceiling = quota.Amount{}
	if d := cmp.Diff(Default(), got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("uncommented it differs from the defaults:\n%s", d)
	}

	// Every key is there: plain ones, those of engines five times, those of namespaces in the example.
	want := 0
	for _, k := range Keys() {
		switch {
		case strings.HasPrefix(k, "namespace."):
			name := strings.TrimPrefix(k, "namespace.*.")
			if !regexp.MustCompile(`(?m)^#   ` + name + ` = `).MatchString(text) {
				t.Errorf("the example of a namespace lacks %s", name)
			}
		case strings.Contains(k, "*"):
			want += len(quota.Engines())
		default:
			want++
		}
	}
	if keys != want {
		t.Errorf("%d keys in the file, want %d", keys, want)
	}
}

func TestPackagedExampleIsValid(t *testing.T) {
	var example []string
	for line := range strings.SplitSeq(read1(t, packaged), "\n") {
		if l, ok := strings.CutPrefix(line, "#   "); ok {
			example = append(example, l)
		}
	}
	c, err := Parse("example", []byte(strings.Join(example, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Policy.Namespaces) != 1 || c.Policy.Namespaces[0].Pattern != "team-*" {
		t.Errorf("rules %+v", c.Policy.Namespaces)
	}
}

func TestDocumentedKeys(t *testing.T) {
	text := read1(t, "../../docs/configuration.md")
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(text, -1) {
		documented[m[1]] = true
	}
	for _, k := range Keys() {
		name := strings.Replace(strings.Replace(k, "namespace.*", "namespace.<pattern>", 1), "*", "<engine>", 1)
		if !documented[name] {
			t.Errorf("docs/configuration.md lacks %s", name)
		}
		delete(documented, name)
	}
	for k := range documented {
		t.Errorf("docs/configuration.md has %s, which does not exist", k)
	}
}

func TestParse(t *testing.T) {
	got, err := Parse("c", []byte(`
mode = "warn"
overcommit = true
unmanaged = "kill"
unmanaged-exempt = ["comm:Xorg", "cgroup:/system.slice/*"]
shim-missing = "kill"
fail-open = true
admit = "kill-over-min"
placement = "binpack"
throttle = "freeze"
freeze-slice = "20ms"
freeze-share = "25%"
kill-mps = true
metrics-address = "[::1]:9836"
socket = "/tmp/x//s"
runtimes = ["/usr/bin/runc"]
sample = "50ms"
kill-slack = "0"
kill-slack-share = "0.5%"
reserve = 0
ceiling.max = "50%"
[default]
cri = "1/4"
docker = "3Gi"
[privileged]
cri = "report"
[accept.cri]
env = true
[namespace."team-*"]
max = "8Gi"
min-total = "25%"
default = "unlimited"
[namespace]
lab = { mode = "observe", require = "hard" }
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.Policy.Mode = quota.ModeWarn
	want.Policy.Overcommit = true
	want.Unmanaged = "kill"
	want.UnmanagedExempt = []Exempt{{ExemptComm, "Xorg"}, {ExemptCgroup, "/system.slice/*"}}
	want.ShimMissing, want.FailOpen, want.Admit, want.Placement = "kill", true, "kill-over-min", "binpack"
	want.Throttle, want.FreezeSlice, want.FreezeShare, want.KillMPS = "freeze", 20*time.Millisecond, 0.25, true
	want.MetricsAddress = "[::1]:9836"
	want.Socket = "/tmp/x/s"
	want.Runtimes = []string{"/usr/bin/runc"}
	want.Sample = 50 * time.Millisecond
	want.KillSlackBytes, want.KillSlackShare, want.ReserveBytes = 0, 0.005, 0
	want.Policy.Ceiling = quota.Share(1, 2)
	want.Policy.Default[quota.EngineCRI] = quota.Default{Kind: quota.DefaultAmount, Amount: quota.Share(1, 4)}
	want.Policy.Default[quota.EngineDocker] = quota.Default{Kind: quota.DefaultAmount, Amount: quota.Bytes(3 << 30)}
	want.Policy.PrivilegedRefuse[quota.EngineCRI] = false
	want.Policy.Accept[quota.EngineCRI] = quota.Accept{Keys: true, Aliases: true, Env: true}
	want.Policy.Namespaces = []quota.NamespaceRule{
		{Pattern: "lab", Mode: quota.ModeObserve, Require: quota.LevelHard},
		{Pattern: "team-*", Ceiling: quota.Bytes(8 << 30), MinTotal: quota.Share(1, 4), Default: &quota.Default{Kind: quota.DefaultUnlimited}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
	// Defaults are nobody's to change.
	if d := Default(); d.Policy.Default[quota.EngineCRI].Kind != quota.DefaultDeny {
		t.Error("a file changed the defaults of others")
	}
}

func TestParseResizeByAnnotation(t *testing.T) {
	c, err := Parse("c", []byte("[accept.cri]\nresize-by-annotation = true"))
	if err != nil || !c.Policy.Accept[quota.EngineCRI].ResizeByAnnotation || c.Policy.Accept[quota.EngineCRIO].ResizeByAnnotation {
		t.Errorf("%+v, %v", c.Policy.Accept, err)
	}
}

func TestParseErrors(t *testing.T) {
	tests := []struct{ in, want string }{
		{"mode = \"enforced\"", `E1503 c line 1: mode "enforced" is not one of enforce, warn, observe: write enforce`},
		{"\n\nmode = 3", `E1503 c line 3: mode 3 is not one of enforce, warn, observe: put it in quotes`},
		{"mod = \"warn\"", `E1503 c line 1: mod is not a key of this file: write mode`},
		{"colour = 1", `E1503 c line 1: colour is not a key of this file: the keys there are mode, require, overcommit, unmanaged, unmanaged-exempt, shim-missing, fail-open, admit, placement, throttle, freeze-slice, freeze-share, gate, gate-strict, gate-pins, gate-managed, kill-mps, socket, metrics-address, run-dir, state-dir, runtimes, hook-path, shim-delivery, shim-library, shim-library-32, cdi-spec-dirs, cdi-kinds, nvml-library, dmem-dir, sample, sample-idle, sample-deadline, settle, stuck-after, kill-slack, kill-slack-share, kill-interval, reserve, reserve-share, module, context, prepare-hold, pages-hold, resize-deadline, ended-keep, wait-socket, default, privileged, ceiling, accept, namespace`},
		{"[ceilling]\nmax = \"4Gi\"", `E1503 c line 1: ceilling is not a key of this file: write ceiling`},
		{"[ceiling]\nmax = \"4096\"", `E1503 c line 2: ceiling.max "4096" has no unit: write 4096Mi`},
		{"[ceiling]\nmax = 4096", `E1503 c line 2: ceiling.max 4096 is not a quantity such as "4Gi": put it in quotes`},
		{"[ceiling]\nmax = \"0\"", `E1503 c line 2: ceiling.max is 0, so that no container could start: write max for no ceiling`},
		{"[ceiling]\nmin = \"4Gi\"", `E1503 c line 2: ceiling.min is not a key of this file: the keys there are max`},
		{"require = \"advisory\"", `E1503 c line 1: require "advisory" is not one of reactive, hard`},
		{"unmanaged = \"kil\"", `E1503 c line 1: unmanaged "kil" is not one of allow, warn, deny, kill: write kill`},
		{"shim-missing = true", `E1503 c line 1: shim-missing true is not one of report, kill: put it in quotes`},
		{"unmanaged-exempt = [\"Xorg\"]", `E1503 c line 1: unmanaged-exempt has the item "Xorg", which is neither exe:/path, cgroup:/path nor comm:name`},
		{"unmanaged-exempt = [\"exe:Xorg\"]", `E1503 c line 1: unmanaged-exempt has the item "exe:Xorg", which has no plain absolute path`},
		{"unmanaged-exempt = [\"comm:[a\"]", `E1503 c line 1: unmanaged-exempt has the item "comm:[a", which is no pattern`},
		{"unmanaged-exempt = [\"cgroup:/*\"]", `E1503 c line 1: unmanaged-exempt has the item "cgroup:/*", which exempts everything: write unmanaged = "allow" for that`},
		{"fail-open = \"yes\"", `E1503 c line 1: fail-open "yes" is neither true nor false: write one of them, without quotes`},
		{"admit = \"fre\"", `E1503 c line 1: admit "fre" is not one of free, kill-over-min: write free`},
		{"placement = \"pack\"", `E1503 c line 1: placement "pack" is not one of spread, binpack`},
		{"throttle = \"slow\"", `E1503 c line 1: throttle "slow" is not one of shim, freeze, off`},
		{"freeze-slice = \"1s\"", `E1503 c line 1: freeze-slice "1s" is not between 1ms and 50ms`},
		{"freeze-share = \"60%\"", `E1503 c line 1: freeze-share "60%" is not above 0% and at most 50%: write one such as 25%`},
		{"freeze-share = \"0%\"", `E1503 c line 1: freeze-share "0%" is not above 0% and at most 50%: write one such as 25%`},
		{"metrics-address = \"9836\"", `E1503 c line 1: metrics-address "9836" is not an address such as "127.0.0.1:9836"`},
		{"metrics-address = \"example.org:9836\"", `E1503 c line 1: metrics-address "example.org:9836" is not an address such as "127.0.0.1:9836"`},
		{"metrics-address = \"[::1]:0\"", `E1503 c line 1: metrics-address "[::1]:0" is not an address such as "127.0.0.1:9836"`},
		{"shim-delivery = \"stubs\"", `E1503 c line 1: shim-delivery "stubs" is not one of preload, stub, off: write stub`},
		{"[accept.cri]\nenv = \"yes\"", `E1503 c line 2: accept.cri.env "yes" is neither true nor false: write one of them, without quotes`},
		{"[accept.dokcer]\nenv = true", `E1503 c line 2: accept.dokcer.env is of no engine that exists: write docker`},
		{"[accept.cri]\nresize-by-annotation = 1", `E1503 c line 2: accept.cri.resize-by-annotation "1" is neither true nor false: write one of them, without quotes`},
		{"[accept.lxc]\nresize-by-annotation = false", `E1503 c line 2: accept.lxc.resize-by-annotation is of no engine that exists: the engines are cri, crio, docker, podman, oci`},
		{"[accept.cri]\nenvs = true", `E1503 c line 2: accept.cri.envs is not a key of this file: write env`},
		{"[default]\ncri = \"denied\"", `E1503 c line 2: default.cri "denied" is not a quantity: write deny, unlimited, or an amount such as 4Gi`},
		{"[default]\ncri = \"denny\"", `E1503 c line 2: default.cri "denny" is not a quantity: write deny`},
		{"[default]\ncri = \"4g\"", `E1503 c line 2: default.cri "4g" has an unknown unit: write 4Gi`},
		{"[default]\ncri = \"1/0\"", `E1503 c line 2: default.cri "1/0" is not 1/N with N from 1 to 1024: write one such as 1/4`},
		{"[default]\ncri = \"0%\"", `E1503 c line 2: default.cri "0%" is no memory at all: write deny`},
		{"[default]\ncri = \"8Gi\"\n[ceiling]\nmax = \"4Gi\"", `E1503 c line 2: default.cri is 8Gi, above ceiling.max, which is 4Gi: write at most that`},
		{"[namespace.a]\ndefault = \"8Gi\"\nmax = \"4Gi\"", `E1503 c line 2: namespace.a.default is 8Gi, above the ceiling there, which is 4Gi: write at most that`},
		{"[namespace.a]\ndefault = \"50%\"\n[ceiling]\nmax = \"25%\"", `E1503 c line 2: namespace.a.default is 50%, above the ceiling there, which is 25%: write at most that`},
		{"[namespace.\"[a\"]\nmode = \"warn\"", `E1503 c line 1: namespace."[a" is not a pattern of namespaces: write one such as [namespace."team-*"]`},
		{"[namespace.a]\nceiling = \"1Gi\"", `E1503 c line 2: namespace.a.ceiling is not a key of this file: the keys there are mode, require, default, max, min-total`},
		{"privileged = \"refuse\"", `E1503 c line 1: privileged is not a table: write [privileged]`},
		{"[privileged]\ncri = \"kill\"", `E1503 c line 2: privileged.cri "kill" is not one of refuse, report`},
		{"[mode]\nx = 1", `E1503 c line 1: mode is a table: write mode = …`},
		{"socket = \"run/x\"", `E1503 c line 1: socket "run/x" is not an absolute path`},
		{"socket = \"\"", `E1503 c line 1: socket "" is not an absolute path`},
		{"runtimes = []", `E1503 c line 1: runtimes is empty: remove the line for the default`},
		{"runtimes = \"runc\"", `E1503 c line 1: runtimes "runc" is not a list: write one such as ["a", "b"]`},
		{"runtimes = [\"bin/runc\"]", `E1503 c line 1: runtimes has the item "bin/runc", which is neither a name nor an absolute path`},
		{"runtimes = [\"runc\", \"runc\"]", `E1503 c line 1: runtimes has the item "runc", which is there twice`},
		{"runtimes = [\"\"]", `E1503 c line 1: runtimes has the item "", which is empty`},
		{"runtimes = [1]", `E1503 c line 1: runtimes 1 is not a text: put it in quotes`},
		{"cdi-spec-dirs = [\"cdi\"]", `E1503 c line 1: cdi-spec-dirs has the item "cdi", which is not an absolute path`},
		{"cdi-kinds = [\"gpu\"]", `E1503 c line 1: cdi-kinds has the item "gpu", which is not a kind such as nvidia.com/gpu`},
		{"sample = \"100\"", `E1503 c line 1: sample "100" is not a time such as "100ms", "5s" or "10m"`},
		{"sample = 100", `E1503 c line 1: sample 100 is not a time such as "100ms", "5s" or "10m": put it in quotes`},
		{"sample = \"1ms\"", `E1503 c line 1: sample "1ms" is not between 10ms and 1m0s`},
		{"sample = \"2s\"", `E1503 c: sample-idle is 1s, less than sample, which is 2s: write at least that`},
		{"settle = \"20s\"", `E1503 c: stuck-after is 10s, less than settle, which is 20s: write at least that`},
		{"pages-hold = \"30s\"", `E1503 c line 1: pages-hold is 30s, less than prepare-hold, which is 1m0s: write at least that`},
		{"wait-socket = \"9s\"", `E1503 c line 1: wait-socket "9s" is not between 0s and 8s`},
		{"kill-slack = \"64M i\"", `E1503 c line 1: kill-slack "64M i" has an unknown unit: write one such as 4Gi (Ki, Mi, Gi, Ti, or k, M, G, T)`},
		{"kill-slack-share = \"100%\"", `E1503 c line 1: kill-slack-share "100%" leaves nothing: write less than 100%`},
		{"kill-slack-share = \"2\"", `E1503 c line 1: kill-slack-share "2" is not a percentage such as "3%"`},
		{"mode = \"warn\"\nmode = \"warn\"", `E1503 c line 2 column 1 is not TOML: `},
		{"mode = ", `E1503 c line 1 column `},
		{"\x00", `E1503 c line 1 column 1 is not TOML: `},
	}
	for _, tt := range tests {
		_, err := Parse("c", []byte(tt.in))
		if err == nil {
			t.Errorf("%q: no error, want %s", tt.in, tt.want)
			continue
		}
		if got := err.Error(); got != tt.want && (!strings.HasSuffix(tt.want, " ") || !strings.HasPrefix(got, tt.want)) {
			t.Errorf("%q:\n got %s\nwant %s", tt.in, got, tt.want)
		}
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: more than one line: %q", tt.in, err)
		}
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	if c, err := Load(file("good.toml", `mode = "observe"`)); err != nil || c.Policy.Mode != quota.ModeObserve {
		t.Errorf("good: %v, %v", c.Policy.Mode, err)
	}
	tests := []struct {
		path string
		code quota.Code
	}{
		{filepath.Join(dir, "missing.toml"), quota.CodePolicyUnread},
		{dir, quota.CodePolicyUnread},
		{file("bad.toml", "mode"), quota.CodeBadPolicy},
		{file("huge.toml", strings.Repeat("# x\n", 1<<18+1)), quota.CodePolicyUnread},
	}
	for _, tt := range tests {
		_, err := Load(tt.path)
		if !errors.Is(err, tt.code) {
			t.Errorf("%s: %v, want code %s", tt.path, err, tt.code)
		}
		if err != nil && !strings.Contains(err.Error(), filepath.Base(tt.path)) {
			t.Errorf("%s: the error does not name it: %v", tt.path, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	text := read1(f, packaged)
	plain, _ := uncommented(text)
	for _, s := range []string{text, plain, "", "[a]\n[a.b]", "mode = [", "[namespace.\"*\"]\nmax=\"1/3\"", "a.b.c.d = 1", "[[accept]]", "accept = [1]", "mode = 2026-01-01", "x = {a = {b = 1}}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := Parse("c", in)
		if err != nil {
			if quota.CodeOf(err) == "" || strings.ContainsAny(err.Error(), "\n\r") {
				t.Errorf("not one coded sentence: %q", err)
			}
			return
		}
		if c.Socket == "" || len(c.Runtimes) == 0 || c.Sample <= 0 || len(c.Policy.Default) != len(quota.Engines()) {
			t.Errorf("defaults were lost: %+v", c)
		}
	})
}
