// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// TestModelOnLlama: llama.cpp loads a model, decodes a prompt and tokens with all of it on the GPU, is refused a context
// whose keys and values do not fit into the limit, says so as ever, and decodes on.
func TestModelOnLlama(t *testing.T) {
	t.Parallel()
	for _, a := range applications {
		if !strings.HasPrefix(a.short, "llama") {
			continue
		}
		t.Run(a.short, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t, a.cuda, "--model", "a10", "--module-bytes", strconv.FormatUint(module, 10))
			library := a.library(t)
			runtime := filepath.Dir(simtest.Dist(t, "simgpu/runtime/libnccl.so.2"))
			var without computed
			for _, delivery := range deliveries {
				t.Run(delivery, func(t *testing.T) {
					defer func() { note("a model on "+a.name, delivery, verdict(t)+nothing) }()
					var c computed
					if err := p.python(delivery, "nvml", "llama.py", &c, runtime, a.major, library, strconv.FormatUint(limit, 10)); err != nil {
						t.Fatal(err)
					}
					t.Logf("%v\n%v\n%s", c.Steps, c.Sizes, c.Log)
					if delivery == none {
						without = c
					}
					c.decoded(t, delivery != none, without)
					p.idle()
				})
			}
		})
	}
}

// decoded compares what llama.cpp did with what it must do, in the limit or not.
func (c computed) decoded(t *testing.T, limited bool, without computed) {
	t.Helper()
	if len(c.Steps) != len(without.Steps) || len(c.Steps) < 17 {
		t.Errorf("%d steps, %d without the shim", len(c.Steps), len(without.Steps))
	}
	for step, word := range c.Steps {
		want := "0"
		switch {
		case step == "too large a context" && limited:
			want = "refused"
		case !strings.HasPrefix(step, "a prompt") && !strings.HasPrefix(step, "token ") && step != "a token after that":
			want = "granted"
		}
		if word != want {
			t.Errorf("%s: %s, want %s", step, word, want)
		}
	}
	for _, message := range []string{"cudaMalloc failed: out of memory", "failed to initialize the context"} {
		if strings.Contains(c.Log, message) != limited {
			t.Errorf("%q printed: %v", message, !limited)
		}
	}
	if takes := c.Sizes["model takes"]; takes < c.Sizes["weights"] || takes > c.Sizes["weights"]+8*mib || takes != without.Sizes["model takes"] {
		t.Errorf("weights of %d take %d, %d without the shim", c.Sizes["weights"], takes, without.Sizes["model takes"])
	}
	// Its code stays loaded.
	kept, keeps := c.Sizes["free before"]-c.Sizes["free after"], without.Sizes["free before"]-without.Sizes["free after"]
	if kept != keeps || kept%module != 0 || kept > 64*module {
		t.Errorf("it keeps %d, without the shim %d", kept, keeps)
	}
}
