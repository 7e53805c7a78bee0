// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpufence/gpufence/tests/node"
)

// benches are the programs that measure the shim on a driver that does nothing, which is the same everywhere.
var benches = []string{"account", "pair", "launch", "start", "dlsym_miss"}

const benchTime = time.Minute

// testBench measures the shim on this driver, and on one that does nothing. Figures are told, not judged.
func (s *session) testBench(ctx context.Context) {
	s.row(ctx, "bench", "cuMemAlloc and cuMemFree, cuMemGetInfo, on this driver", false, benchTime, s.benchPair)
	all := benches
	if s.opts.Quick {
		all = []string{"launch"}
	}
	for _, name := range all {
		s.row(ctx, "bench", name+", on a driver that does nothing", false, benchTime, func(ctx context.Context, numbers map[string]any) (string, error) {
			return "", s.benchProgram(ctx, name, numbers)
		})
	}
}

// benchPair runs the same probe without and with the shim, twice each, in turn.
func (s *session) benchPair(ctx context.Context, numbers map[string]any) (_ string, err error) {
	p, err := s.open(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, p.close(ctx)) }()
	for round := 1; round <= 2; round++ {
		seen, err := s.probe(ctx, "pair-cost", nil)
		if err != nil {
			return "", err
		}
		var line costs
		c, err := p.container(ctx, node.Spec{
			Name: fmt.Sprintf("pair-%d", round), Shim: true,
			// Its line is no Reply: it goes into a file.
			Program: []string{"/bin/sh", "-c", `exec "$0" pair-cost >"$1"`, s.path("hardware/probe"), filepath.Join(s.tmp, "pair")},
		})
		if err != nil {
			return "", err
		}
		if err := c.Main.Await(ctx); err != nil {
			return "", err
		}
		text, err := os.ReadFile(filepath.Join(s.tmp, "pair"))
		if err == nil {
			err = json.Unmarshal(text, &line)
		}
		if err != nil {
			return "", fmt.Errorf("read what the probe saw with the shim: %w", err)
		}
		if !line.OK || line.Total != s.driver.limit {
			return "", fmt.Errorf("with the shim the probe saw %s", text)
		}
		numbers[fmt.Sprintf("pair_ns_without_%d", round)] = number(seen["pair_ns"])
		numbers[fmt.Sprintf("pair_ns_with_%d", round)] = line.Pair
		numbers[fmt.Sprintf("info_ns_without_%d", round)] = number(seen["info_ns"])
		numbers[fmt.Sprintf("info_ns_with_%d", round)] = line.Info
	}
	return "medians of 21 batches of 50", nil
}

// costs is a line of the probe pair-cost.
type costs struct {
	OK    bool   `json:"ok"`
	Pair  uint64 `json:"pair_ns"`
	Info  uint64 `json:"info_ns"`
	Total uint64 `json:"total_bytes"`
}

// benchProgram runs one program of dist/bench through the table's tool.
func (s *session) benchProgram(ctx context.Context, name string, numbers map[string]any) error {
	for _, f := range []string{"bin/bench", "bench/" + name} {
		if _, err := os.Stat(s.path(f)); err != nil {
			return impossible(f + " was not built: make test-gpu builds it")
		}
	}
	// It writes its table into the folder that it runs from, which may be read only.
	dir := filepath.Join(s.tmp, "bench-"+name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make a folder: %w", err)
	}
	for _, link := range []string{"bin", "bench", "lib", "clients", "simgpu"} {
		if err := os.Symlink(s.path(link), filepath.Join(dir, link)); err != nil {
			return fmt.Errorf("link %s: %w", link, err)
		}
	}
	cmd := exec.CommandContext(ctx, s.path("bin/bench"), "--dist", dir, "--only", name)
	cmd.Env = s.before
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("measure: %w: %s", err, tail(string(out), 300))
	}
	text, err := os.ReadFile(filepath.Join(dir, "bench.json"))
	if err != nil {
		return fmt.Errorf("measure: %w", err)
	}
	var rows []struct {
		Name   string  `json:"name"`
		Unit   string  `json:"unit"`
		Median float64 `json:"median"`
		Added  float64 `json:"added"`
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return fmt.Errorf("measure: %w", err)
	}
	for _, r := range rows {
		numbers[strings.ReplaceAll(r.Name, ",", "")] = fmt.Sprintf("%.4g %s, added %.4g", r.Median, r.Unit, r.Added)
	}
	if len(rows) == 0 {
		return errors.New("nothing was measured")
	}
	return nil
}
