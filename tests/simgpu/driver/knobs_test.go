// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestKnobsReadWhatTheyWrite(t *testing.T) {
	t.Parallel()
	defaults := DefaultKnobs()
	for _, k := range AllKnobs() {
		var other Knobs
		if err := k.Set(&other, k.Get(&defaults)); err != nil {
			t.Errorf("%s: %v", k.Name, err)
		}
		if k.Get(&other) != k.Get(&defaults) || k.Help == "" {
			t.Errorf("%s: wrote %s, read %s", k.Name, k.Get(&defaults), k.Get(&other))
		}
	}
}

func TestSetKnob(t *testing.T) {
	t.Parallel()
	var k Knobs
	for name, value := range map[string]string{
		"nvml-lag": "200ms", "hang": "1", "lost": "1", "unknown": "process", "used-by-others": "2Gi",
		"late-steps": "3", "pid-view": "caller", "managed-evict": "0", "free-lag": "0",
	} {
		if err := SetKnob(&k, name, value); err != nil {
			t.Error(err)
		}
	}
	want := Knobs{NVMLLag: 200 * time.Millisecond, Hang: HangNVML, Lost: true, Unknown: UnknownProcess, OthersBytes: 2 * gib, LateSteps: 3, PIDView: PIDCaller}
	if k != want {
		t.Errorf("got %+v, want %+v", k, want)
	}
	for name, value := range map[string]string{
		"nvml-lag": "2m", "call-cost": "-1s", "hang": "maybe", "lost": "perhaps", "used-by-others": "2g",
		"late-steps": "-1", "second-context": "101", "nosuch": "1", "late-bytes": "9999999999Ti",
	} {
		before := k
		err := SetKnob(&k, name, value)
		if !errors.Is(err, ErrKnob) || !strings.Contains(err.Error(), name) || k != before {
			t.Errorf("%s=%s: %v, changed: %v", name, value, err, k != before)
		}
	}
}

func TestParseSize(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]uint64{"0": 0, "512": 512, "104MiB": 104 * mib, "16Gi": 16 * gib, "1TiB": 1 << 40, "3Ki": 3072} {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("%s: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "Gi", "-1", "1.5Gi", "4g", "1 Gi", "99999999Ti", "0x10"} {
		if got, err := ParseSize(s); err == nil {
			t.Errorf("%q: %d", s, got)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	f.Add("16GiB")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := ParseSize(s); err == nil && int64(n) < 0 {
			t.Errorf("%q: %d", s, n)
		}
	})
}

func TestUUIDs(t *testing.T) {
	t.Parallel()
	u := SeededUUID("x", 0)
	if u == SeededUUID("x", 1) || u == SeededUUID("y", 0) || u != SeededUUID("x", 0) {
		t.Error("UUIDs do not follow seed and number")
	}
	back, err := ParseUUID(strings.ToUpper(UUIDText(u)))
	if err != nil || back != u {
		t.Errorf("%s read back: %v, %v", UUIDText(u), back, err)
	}
	for _, s := range []string{"", "GPU-", "GPU-123", strings.TrimPrefix(UUIDText(u), "GPU-"), UUIDText(u) + "0", strings.Replace(UUIDText(u), "-", "_", 3)} {
		if _, err := ParseUUID(s); err == nil {
			t.Errorf("%q was read", s)
		}
	}
}

func TestModels(t *testing.T) {
	t.Parallel()
	for name := range models {
		c, err := Model(strings.ToUpper(name))
		if err != nil || c.TotalBytes%mib != 0 || c.ContextBytes%wirePage != 0 || c.SMCount == 0 || c.ThreadsPerSM == 0 {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
	if _, err := Model("t5"); err == nil || !strings.Contains(err.Error(), "t4") {
		t.Errorf("unknown model: %v", err)
	}
}

const wirePage = 2 << 20
