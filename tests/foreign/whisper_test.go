// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestModelOnWhisper: whisper.cpp loads a model, encodes and decodes on the GPU; a second model whose keys and values do
// not fit into what is left of the limit is refused as ever, the first goes on, and when there is room again another one
// loads.
func TestModelOnWhisper(t *testing.T) {
	t.Parallel()
	for _, a := range applications {
		if !strings.HasPrefix(a.short, "whisper") {
			continue
		}
		p := newPlace(t, a.cuda, "--model", "a10", "--module-bytes", strconv.FormatUint(module, 10))
		library := a.library(t)
		runtime := filepath.Dir(simtest.Dist(t, "simgpu/runtime/libnccl.so.2"))
		var without computed
		for _, delivery := range deliveries {
			t.Run(delivery, func(t *testing.T) {
				defer func() { note("a model on "+a.name, delivery, verdict(t)+nothing) }()
				var c computed
				if err := p.python(delivery, "nvml", "whisper.py", &c, runtime, a.major, library, strconv.FormatUint(limit, 10)); err != nil {
					t.Fatal(err)
				}
				t.Logf("%v\n%v\n%s", c.Steps, c.Sizes, c.Log)
				if delivery == none {
					without = c
				}
				c.listened(t, delivery != none, without)
				p.idle()
			})
		}
	}
}

// listened compares what whisper.cpp did with what it must do, in the limit or not.
func (c computed) listened(t *testing.T, limited bool, without computed) {
	t.Helper()
	if len(c.Steps) != len(without.Steps) || len(c.Steps) < 16 {
		t.Errorf("%d steps, %d without the shim", len(c.Steps), len(without.Steps))
	}
	for step, word := range c.Steps {
		want := "granted"
		switch {
		case step == "a second model" && limited:
			want = "refused"
		case strings.Contains(step, "spectrum") || strings.Contains(step, "encoded") || strings.Contains(step, "token"):
			want = "0"
		}
		if word != want {
			t.Errorf("%s: %s, want %s", step, word, want)
		}
	}
	for _, message := range []string{"cudaMalloc failed: out of memory", "failed to allocate memory for the kv cache"} {
		if strings.Contains(c.Log, message) != limited {
			t.Errorf("%q printed: %v", message, !limited)
		}
	}
	if c.Sizes["model takes"] < c.Sizes["weights"] || c.Sizes["model takes"] != without.Sizes["model takes"] {
		t.Errorf("weights of %d take %d, %d without the shim", c.Sizes["weights"], c.Sizes["model takes"], without.Sizes["model takes"])
	}
	// Its code stays loaded.
	kept, keeps := c.Sizes["free before"]-c.Sizes["free after"], without.Sizes["free before"]-without.Sizes["free after"]
	if kept != keeps || kept%module != 0 || kept > 64*module {
		t.Errorf("it keeps %d, without the shim %d", kept, keeps)
	}
}
