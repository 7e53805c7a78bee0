// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/gpufence/gpufence/tests/demo"
)

const demoTime = 2 * time.Minute

// testDemo plays the demo; each of its claims is a row.
func (s *session) testDemo(ctx context.Context) {
	var result demo.Result
	verdict := s.row(ctx, "demo", "the demo plays", true, demoTime, func(ctx context.Context, numbers map[string]any) (string, error) {
		for _, name := range []string{"runc", "busybox"} {
			if _, err := exec.LookPath(name); err != nil {
				return "", impossible("there is no " + name + " in PATH")
			}
		}
		if s.driver.missing != "" {
			return "", impossible(s.driver.missing)
		}
		cmd := exec.CommandContext(ctx, s.path("bin/gpufence"), "demo", "--dist", s.opts.Dir, "--output", "json")
		cmd.Env = s.before
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		if bad := json.Unmarshal(stdout.Bytes(), &result); bad != nil {
			return "", fmt.Errorf("play the demo: %w: %s", errors.Join(err, bad), tail(stderr.String(), 400))
		}
		numbers["steps"], numbers["seconds"] = len(result.Steps), int(result.Seconds)
		if len(result.Steps) < 10 {
			return "", fmt.Errorf("only %d steps were played", len(result.Steps))
		}
		return "on " + result.GPU, nil
	})
	if verdict != Pass {
		return
	}
	for _, row := range demoRows(result, s.report.Simulated) {
		s.add(row)
	}
}

// demoRows are its claims. On a machine with a GPU those that were played on the simulated one say nothing.
func demoRows(result demo.Result, simulated bool) []Row {
	var out []Row
	for _, step := range result.Steps {
		row := Row{Suite: "demo", Name: step.Name, Must: true, Verdict: Pass, Detail: step.Detail, Numbers: map[string]any{}}
		for k, v := range step.Numbers {
			row.Numbers[k] = v
		}
		switch {
		case !step.Held:
			row.Verdict = Fail
		case !simulated && strings.Contains(result.GPU, "(simulated)"):
			row.Verdict, row.Detail = Impossible, "played on a simulated GPU, since no CDI specification names the real one"
		}
		out = append(out, row)
	}
	return out
}
