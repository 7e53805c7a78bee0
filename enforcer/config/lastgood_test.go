// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpufence/gpufence/enforcer/quota"
)

func write1(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAWrongFileNeverReplacesAGoodOne(t *testing.T) {
	dir := t.TempDir()
	file, other, state := filepath.Join(dir, "config.toml"), filepath.Join(dir, "other.toml"), filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	write1(t, file, "mode = \"sometimes\"\n")
	if _, err := LoadOrLastGood(file, state); quota.CodeOf(err) != quota.CodeBadPolicy {
		t.Errorf("without a copy: %v", err)
	}
	write1(t, file, "mode = \"warn\"\n")
	good, err := LoadOrLastGood(file, state)
	if err != nil || good.FileErr != nil || good.Config.Policy.Mode != quota.ModeWarn {
		t.Fatalf("a good file: %+v, %v", good, err)
	}
	for range 2 {
		if err := SaveLastGood(state, good); err != nil {
			t.Fatal(err)
		}
	}
	for _, damage := range []func(){
		func() { write1(t, file, "mode = \"sometimes\"\n") },
		func() { write1(t, file, "mode = ") },
		func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		},
	} {
		damage()
		got, err := LoadOrLastGood(file, state)
		if err != nil || got.FileErr == nil || got.Config.Policy.Mode != quota.ModeWarn || got.Path != file {
			t.Errorf("after damage: %+v, %v", got, err)
		}
		if !strings.Contains(got.FileErr.Error(), file) {
			t.Errorf("the error does not name the file: %v", got.FileErr)
		}
	}
	// The copy of one file does not stand in for another.
	write1(t, other, "mode = \"sometimes\"\n")
	if _, err := LoadOrLastGood(other, state); err == nil {
		t.Error("another file's copy was taken")
	}
	// A copy that cannot be used is none.
	for _, text := range []string{"", "mode = \"warn\"\n", lastGoodHead + quota.Quote(file) + "\nfuture = 1\n"} {
		write1(t, filepath.Join(state, LastGoodName), text)
		if l, err := LoadOrLastGood(file, state); err == nil {
			t.Errorf("took %q: %+v", text, l)
		}
	}
	if err := SaveLastGood(filepath.Join(dir, "none"), good); err == nil {
		t.Error("kept a copy in a folder that is not there")
	}
	if err := SaveLastGood(state, Loaded{Path: "a\nb"}); err == nil {
		t.Error("kept a copy of a path with two lines")
	}
	left, err := filepath.Glob(filepath.Join(state, ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestDefaultsAreKeptToo(t *testing.T) {
	state := t.TempDir()
	l := Loaded{Config: Default(), Path: DefaultPath}
	if err := SaveLastGood(state, l); err != nil {
		t.Fatal(err)
	}
	text := read1(t, filepath.Join(state, LastGoodName))
	if c, err := Parse("copy", []byte(text)); err != nil || !cmp.Equal(c, Default()) {
		t.Errorf("the copy is not a configuration: %v", err)
	}
}

func TestReloaded(t *testing.T) {
	running, fresh := Default(), Default()
	if got, wait := Reloaded(running, fresh); wait != nil || !cmp.Equal(got, fresh) {
		t.Errorf("nothing changed: %v", wait)
	}
	fresh.Socket, fresh.RunDir, fresh.StateDir, fresh.NVMLLibrary, fresh.MetricsAddress = "/a", "/b", "/c", "/d", ":1"
	fresh.GatePins = "/e"
	fresh.Unmanaged, fresh.Policy.Mode = "kill", quota.ModeWarn
	got, wait := Reloaded(running, fresh)
	if want := []string{"socket", "run-dir", "state-dir", "nvml-library", "gate-pins", "metrics-address"}; !cmp.Equal(wait, want) {
		t.Errorf("keys that wait: %v", wait)
	}
	want := Default()
	want.Unmanaged, want.Policy.Mode = "kill", quota.ModeWarn
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestExempt(t *testing.T) {
	for _, tt := range []struct {
		item string
		p    Identity
		want bool
	}{
		{"exe:/usr/bin/nv-hostengine", Identity{Exe: "/usr/bin/nv-hostengine"}, true},
		{"exe:/usr/bin/nv-*", Identity{Exe: "/usr/bin/nv-hostengine"}, true},
		{"exe:/usr/bin/*", Identity{Exe: "/usr/bin/x/y"}, false},
		{"exe:/usr/bin/nv-hostengine", Identity{Comm: "nv-hostengine"}, false}, // not of the host
		{"comm:Xorg", Identity{Comm: "Xorg"}, true},
		{"comm:Xorg", Identity{Comm: "Xorg2"}, false},
		{"comm:X*", Identity{Comm: "Xwayland"}, true},
		{"comm:nvidia-persistenced", Identity{Comm: "nvidia-persiste"}, true}, // as the kernel cuts it
		{"comm:*", Identity{}, false},
		{"cgroup:/system.slice/dcgm.service", Identity{Cgroup: "/system.slice/dcgm.service"}, true},
		{"cgroup:/system.slice/dcgm.service", Identity{Cgroup: "/system.slice/dcgm.service/worker"}, true},
		{"cgroup:/system.slice/dcgm.service", Identity{Cgroup: "/system.slice/dcgm.service2"}, false},
		{"cgroup:/system.slice/*", Identity{Cgroup: "/system.slice/a/b/c"}, true},
		{"cgroup:/system.slice/*", Identity{Cgroup: "/system.slice"}, false},
		{"cgroup:/a", Identity{Cgroup: "/"}, false},
		{"cgroup:/a", Identity{Cgroup: "a"}, false},
		{"cgroup:/a", Identity{}, false},
	} {
		e, why := parseExempt(tt.item)
		if why != "" {
			t.Errorf("%s %s", tt.item, why)
			continue
		}
		if e.String() != tt.item {
			t.Errorf("%s is shown as %s", tt.item, e)
		}
		c := Config{UnmanagedExempt: []Exempt{{ExemptComm, "somebody-else"}, e}}
		if got := c.Exempted(tt.p); got != tt.want {
			t.Errorf("%s on %+v: %v", tt.item, tt.p, got)
		}
	}
	if (Exempt{"uid", "0"}).Matches(Identity{Comm: "0"}) {
		t.Error("a kind that does not exist matches")
	}
	if c, err := Parse("c", []byte("unmanaged-exempt = []")); err != nil || c.UnmanagedExempt != nil {
		t.Errorf("nothing exempt: %v, %v", c.UnmanagedExempt, err)
	}
}
