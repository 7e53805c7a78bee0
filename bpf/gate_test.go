// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
)

// TestForDriver holds the table to the layouts that were compiled from the headers of each branch.
func TestForDriver(t *testing.T) {
	for _, tt := range []struct {
		version                          string
		ok                               bool
		params, status21, nvos64, status uint32
		exact                            bool
	}{
		{"525.147.05", true, 120, 24, 40, 36, false},
		{"530.41.03", true, 120, 24, 40, 36, false},
		{"535.274.02", true, 120, 28, 48, 40, false},
		{"545.29.06", true, 128, 28, 48, 40, false},
		{"550.54.14", true, 128, 28, 48, 40, false},
		{"580.95.05", true, 128, 28, 48, 40, false},
		{"595.45.04", true, 128, 28, 48, 40, true},
		{"620.10", false, 0, 28, 48, 40, true},
		{"515.65.01", false, 0, 24, 40, 36, false},
		{"", false, 0, 24, 40, 36, false},
	} {
		a, ok := ForDriver(tt.version)
		if ok != tt.ok || a.ParamsBytes != tt.params || a.NVOS21Status != tt.status21 || a.NVOS64Bytes != tt.nvos64 || a.NVOS64Status != tt.status || a.ExactSizes != tt.exact {
			t.Errorf("%q: %+v, %v", tt.version, a, ok)
		}
		if a.Known {
			t.Errorf("%q is said to be recorded, but no GPU was at hand", tt.version)
		}
	}
}

// TestMaxDepth: gpufenced refuses to say that a cgroup is held which the programs do not find.
func TestMaxDepth(t *testing.T) {
	text, err := os.ReadFile("src/gate.bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	_, levels, _ := strings.Cut(string(text), "#define LEVELS ")
	if levels, _, _ = strings.Cut(levels, " "); levels != strconv.Itoa(MaxDepth+1) {
		t.Errorf("the programs look at %q levels, the root among them, gpufenced counts on %d below it", levels, MaxDepth)
	}
}

func TestParseEvent(t *testing.T) {
	b := make([]byte, 80)
	binary.NativeEndian.PutUint64(b[8:], 7)
	binary.NativeEndian.PutUint64(b[16:], 1<<20)
	binary.NativeEndian.PutUint32(b[40:], 42)
	binary.NativeEndian.PutUint32(b[48:], uint32(gateEventKindEV_RACE))
	binary.NativeEndian.PutUint32(b[56:], 4)
	binary.NativeEndian.PutUint32(b[60:], 12)
	copy(b[64:], "python")
	e, ok := parseEvent(b)
	if !ok || e.Cgroup != 7 || e.SizeBytes != 1<<20 || e.PID != 42 || e.Kind.String() != "changed-request" || e.Door != DoorMmap || e.Errno != 12 || e.Comm != "python" {
		t.Errorf("%+v, %v", e, ok)
	}
	if _, ok := parseEvent(b[:79]); ok {
		t.Error("half an event was taken for one")
	}
}

// FuzzParseEvent: what the kernel writes is read as the compiler has laid it out, and nothing else is an event.
func FuzzParseEvent(f *testing.F) {
	f.Add(make([]byte, 80))
	f.Add([]byte(strings.Repeat("\xff", 81)))
	f.Add([]byte("half"))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := parseEvent(b)
		var c gateEvent
		n, err := binary.Decode(b, binary.NativeEndian, &c)
		if ok != (err == nil) {
			t.Fatalf("%d bytes: %v, %v", len(b), ok, err)
		}
		if !ok {
			return
		}
		comm := make([]byte, 0, len(c.Comm))
		for _, x := range c.Comm {
			if x == 0 {
				break
			}
			comm = append(comm, byte(x))
		}
		want := Event{Cgroup: c.Cgroup, SizeBytes: c.Size, UsedBytes: c.Used, LimitBytes: c.Limit, PID: int(c.Tgid), TID: int(c.Tid),
			Kind: EventKind(c.Kind), Class: c.Class, Door: Door(c.Door), Errno: int(c.Error), Comm: string(comm)}
		if e != want || n != 80 {
			t.Errorf("%+v, want %+v of %d bytes", e, want, n)
		}
		if e.Kind.String() == "" {
			t.Error("a kind without a word")
		}
	})
}

// TestProgramsAreComplete: every name that is loaded by is in the committed object.
func TestProgramsAreComplete(t *testing.T) {
	spec, err := loadGate()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, names := range [][]string{always, doors[CarrierLSM], doors[CarrierFmodRet], copies[CopiesBTF], copies[CopiesProbe]} {
		for _, n := range names {
			seen[n] = true
			if spec.Programs[n] == nil {
				t.Errorf("no program %s", n)
			}
		}
	}
	for n, p := range spec.Programs {
		if !seen[n] {
			t.Errorf("program %s is loaded by nobody", n)
		}
		if p.License != "GPL" {
			t.Errorf("program %s has licence %q: the kernel would refuse its helpers", n, p.License)
		}
	}
	if spec.Programs["lsm_ioctl"].Type != ebpf.LSM {
		t.Error("lsm_ioctl is no security module program")
	}
}

// TestOpenSaysWhatIsMissing: where the gate cannot be had, the reason is typed and nothing stays.
func TestOpenSaysWhatIsMissing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "v1")
	_, err := Open(dir, CarrierLSM)
	var missing *Error
	if !errors.As(err, &missing) || missing.Reason == "" {
		t.Fatalf("open outside a bpf filesystem: %v", err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("a pin folder was left")
	}
	t.Logf("%v", err)
}
