// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/tests/node"
	"github.com/gpufence/gpufence/tests/simgpu/simtest"
)

// module is what gpufenced's configuration has a module charged, by default.
const module = 2 * mib

// nothing is the frontier of what computes, for the table.
const nothing = "; not results: kernels do nothing"

// application is a CUDA back end as its package has it, what it is run on, and what it does with a whole model.
type application struct {
	short, name, cuda, major string
	library                  func(t *testing.T) string
	model                    model
}

// applications are those of npm.txt.
var applications = []application{
	{"llama12", "llama.cpp v0.5.0 (@node-llama-cpp/linux-x64-cuda-ext 3.22.1, CUDA 12), driver 12.8", "12.8", "12", llama("llama-cuda12/bins/linux-x64-cuda/fallback"), decodes},
	{"llama13", "llama.cpp v0.5.0 (@node-llama-cpp/linux-x64-cuda 3.22.1, CUDA 13), driver 13.0", "13.0", "13", llama("llama-cuda13/bins/linux-x64-cuda"), decodes},
	{"whisper12", "whisper.cpp (@fugood/node-whisper-linux-x64-cuda 1.1.3, CUDA 12), driver 12.8", "12.8", "12", func(t *testing.T) string { return filepath.Join(folder(t, "whisper-cuda12"), "index.node") }, listens},
}

// model is what an application does with a whole one, and how that is judged.
type model struct {
	program string
	steps   int                    // at least
	refused string                 // the step that does not fit into the limit
	returns func(step string) bool // the step computes: its word is 0, that of others "granted"
	prints  []string               // where a step is refused
	spare   uint64                 // what the model may take beside its weights
}

// decodes: llama.cpp loads a model, decodes a prompt and tokens with all of it on the GPU, is refused a context whose keys
// and values do not fit into the limit, says so as ever, and decodes on.
var decodes = model{
	program: "llama.py", steps: 17, refused: "too large a context",
	returns: func(step string) bool {
		return strings.HasPrefix(step, "a prompt") || strings.HasPrefix(step, "token ") || step == "a token after that"
	},
	prints: []string{"cudaMalloc failed: out of memory", "failed to initialize the context"},
	spare:  8 * mib,
}

// listens: whisper.cpp loads a model, encodes and decodes on the GPU; a second model whose keys and values do not fit into
// what is left of the limit is refused as ever, the first goes on, and when there is room again another one loads.
var listens = model{
	program: "whisper.py", steps: 16, refused: "a second model",
	returns: func(step string) bool {
		return strings.Contains(step, "spectrum") || strings.Contains(step, "encoded") || strings.Contains(step, "token")
	},
	prints: []string{"cudaMalloc failed: out of memory", "failed to allocate memory for the kv cache"},
	spare:  math.MaxUint64, // it keeps more than its weights on the GPU
}

// llama lays one package's back end beside the libraries that all of them share, as node-llama-cpp does.
func llama(backEnd string) func(t *testing.T) string {
	return func(t *testing.T) string {
		t.Helper()
		dir := t.TempDir()
		shared, err := filepath.Glob(filepath.Join(folder(t, "llama-cuda13"), "bins/linux-x64-cuda/*.so"))
		if err != nil || len(shared) < 5 {
			t.Fatalf("find llama.cpp: %v %v", shared, err)
		}
		for _, file := range shared {
			if filepath.Base(file) == "libggml-cuda.so" {
				file = filepath.Join(filepath.Dir(folder(t, "llama-cuda13")), backEnd, "libggml-cuda.so")
			}
			if err := os.Symlink(file, filepath.Join(dir, filepath.Base(file))); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
}

// computed is what programs/ggml.py writes.
type computed struct {
	Steps map[string]string `json:"steps"`
	Sizes map[string]uint64 `json:"sizes"`
	Log   string            `json:"log"`
}

// idle waits until gpufenced sees nothing of the container on the GPUs.
func (p *place) idle() {
	p.t.Helper()
	if err := node.Retry(p.t.Context(), func() error {
		v, err := p.c.View(p.t.Context())
		if err != nil {
			return err
		}
		for _, g := range v.GPUs {
			if g.Current != 0 || g.Ledger != 0 {
				return fmt.Errorf("%d bytes are still charged, %d in the ledger", g.Current, g.Ledger)
			}
		}
		return nil
	}); err != nil {
		p.t.Error(errors.Join(errors.New("wait for what the container held to be given back"), err))
	}
}

// compute runs a program on an application, without the shim and with it, and has it judged beside what it did without.
func (a application) compute(t *testing.T, program, row string, judge func(t *testing.T, c, without computed, limited bool)) {
	t.Helper()
	// One that the back end makes graphs for; its modules take what the shim charges for them.
	p := newPlace(t, a.cuda, "--model", "a10", "--module-bytes", strconv.FormatUint(module, 10))
	library := a.library(t)
	runtime := filepath.Dir(simtest.Dist(t, "simgpu/runtime/libnccl.so.2"))
	var without computed
	for _, delivery := range deliveries {
		t.Run(delivery, func(t *testing.T) {
			defer func() { note(row, delivery, verdict(t)+nothing) }()
			var c computed
			if err := p.python(delivery, "nvml", program, &c, runtime, a.major, library, strconv.FormatUint(limit, 10)); err != nil {
				t.Fatal(err)
			}
			t.Logf("%v\n%v\n%s", c.Steps, c.Sizes, c.Log)
			if delivery == none {
				without = c
			}
			judge(t, c, without, delivery != none)
			p.idle()
		})
	}
}

// TestBackEndsOfGGML: they load, list the GPU, allocate by cudaMalloc and by a pool of mapped memory, run graphs, and
// in the limit they meet their own path for too little memory: they print what they always print, and go on.
func TestBackEndsOfGGML(t *testing.T) {
	t.Parallel()
	for _, a := range applications {
		t.Run(a.short, func(t *testing.T) {
			t.Parallel()
			a.compute(t, "ggml.py", a.name, func(t *testing.T, c, without computed, limited bool) {
				t.Helper()
				c.check(t, limited)
				for _, what := range []string{"buffer takes", "computing takes"} {
					if c.Sizes[what] != without.Sizes[what] {
						t.Errorf("%s %d, without the shim %d", what, c.Sizes[what], without.Sizes[what])
					}
				}
			})
		})
	}
}

// TestModels: each application computes with a whole model, and in the limit it is refused what its model says.
func TestModels(t *testing.T) {
	t.Parallel()
	for _, a := range applications {
		t.Run(a.short, func(t *testing.T) {
			t.Parallel()
			a.compute(t, a.model.program, "a model on "+a.name, a.model.judge)
		})
	}
}

// judge compares what an application did with what it must do, in the limit or not.
func (m model) judge(t *testing.T, c, without computed, limited bool) {
	t.Helper()
	if len(c.Steps) != len(without.Steps) || len(c.Steps) < m.steps {
		t.Errorf("%d steps, %d without the shim", len(c.Steps), len(without.Steps))
	}
	for step, word := range c.Steps {
		want := "granted"
		switch {
		case step == m.refused && limited:
			want = "refused"
		case m.returns(step):
			want = "0"
		}
		if word != want {
			t.Errorf("%s: %s, want %s", step, word, want)
		}
	}
	for _, message := range m.prints {
		if strings.Contains(c.Log, message) != limited {
			t.Errorf("%q printed: %v", message, !limited)
		}
	}
	if takes := c.Sizes["model takes"]; takes < c.Sizes["weights"] || takes-c.Sizes["weights"] > m.spare || takes != without.Sizes["model takes"] {
		t.Errorf("weights of %d take %d, %d without the shim", c.Sizes["weights"], takes, without.Sizes["model takes"])
	}
	// Its code stays loaded.
	kept, keeps := c.Sizes["free before"]-c.Sizes["free after"], without.Sizes["free before"]-without.Sizes["free after"]
	if kept != keeps || kept%module != 0 || kept > 64*module {
		t.Errorf("it keeps %d, without the shim %d", kept, keeps)
	}
}

// check compares what a back end did with what it must do, in the limit or not.
func (c computed) check(t *testing.T, limited bool) {
	t.Helper()
	want := map[string]string{
		"name": "CUDA0", "description": "NVIDIA A10 (simulated)", "backend": "granted", "buffer": "granted", "pinned buffer": "granted",
		"tensors": "granted", "contents": "right", "compute 0": "0", "compute 1": "0", "compute 2": "0", "compute 3": "0", "compute 4": "0",
		"too large a buffer": "granted", "buffer after that": "granted", "compute after that": "0", "pool beyond the limit": "exit 0",
	}
	total := c.Sizes["total"] > 7000*mib // less what the driver keeps
	messages := map[string]bool{"cudaMalloc failed: out of memory": limited, "CUDA error: out of memory": limited}
	if limited {
		want["too large a buffer"], want["pool beyond the limit"] = "refused", "aborted"
		total = c.Sizes["total"] == limit
	}
	for step, word := range want {
		if c.Steps[step] != word {
			t.Errorf("%s: %s, want %s", step, c.Steps[step], word)
		}
	}
	if len(c.Steps) != len(want) {
		t.Errorf("%d steps, want %d", len(c.Steps), len(want))
	}
	if !total {
		t.Errorf("total memory %d", c.Sizes["total"])
	}
	for message, said := range messages {
		if strings.Contains(c.Log, message) != said {
			t.Errorf("%q printed: %v, want %v", message, !said, said)
		}
	}
	if c.Sizes["buffer takes"] != 64*mib || c.Sizes["computing takes"] < 2*mib {
		t.Errorf("a buffer takes %d, computing %d", c.Sizes["buffer takes"], c.Sizes["computing takes"])
	}
	// Its code stays loaded: that of two kernels, and of the library that multiplies.
	if kept := c.Sizes["free before"] - c.Sizes["free after"]; kept != 3*module {
		t.Errorf("free after all %d, before %d", c.Sizes["free after"], c.Sizes["free before"])
	}
}
