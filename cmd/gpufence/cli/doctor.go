// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/doctor"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// examination is what `doctor -o json` prints. Node is missing where gpufenced does not answer.
type examination struct {
	Level    string           `json:"level"` // that a container may rely on here now
	Worst    doctor.State     `json:"worst"`
	Findings []doctor.Finding `json:"findings"`
	Node     *api.Node        `json:"node,omitempty"`
}

func (a *app) doctor() *cobra.Command {
	var output, root string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "say what this node can promise, what is missing, and the line that mends it",
		Long: "doctor looks at gpufenced, the fences, the configuration, the engines and who else shares GPUs\n" +
			"here. It changes nothing. Exit status 1 if containers do not start or are not fenced.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ex, err := a.examine(cmd.Context(), root)
			if err != nil {
				return err
			}
			if output == "json" {
				err = a.printJSON(ex)
			} else {
				err = a.doctorTable(ex)
			}
			if err == nil && ex.Worst == doctor.Fail {
				err = errSaid // in the findings
			}
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().StringVar(&root, "root", "/", "look at the node below this folder")
	if err := cmd.Flags().MarkHidden("root"); err != nil {
		panic(err) // it was added a line above
	}
	return cmd
}

func (a *app) examine(ctx context.Context, root string) (examination, error) {
	ex := examination{Level: string(quota.LevelNone)}
	node, err := a.client().Node(ctx)
	switch {
	case err == nil:
		ex.Node, ex.Level = &node, node.Level
		ex.Findings = ofNode(&node)
	case errors.Is(err, api.ErrUnreachable):
		ex.Findings = append(ex.Findings, doctor.Finding{
			Area: "gpufenced", Name: "answers", State: doctor.Fail, What: strings.TrimPrefix(oneSentence(err), "gpufence: "), Fix: "systemctl start gpufenced",
		})
	default:
		return ex, err
	}
	ex.Findings = append(ex.Findings, doctor.Node(root)...)
	ex.Worst = doctor.Worst(ex.Findings)
	return ex, nil
}

// ofNode is what gpufenced says of itself, as findings.
func ofNode(n *api.Node) []doctor.Finding {
	var out []doctor.Finding
	add := func(area, name string, s doctor.State, what, fix string) {
		out = append(out, doctor.Finding{Area: area, Name: name, State: s, What: what, Fix: fix})
	}
	add("gpufenced", "answers", doctor.OK, fmt.Sprintf("%s, pid %d, since %s, %d containers on %d GPUs", n.Version.Version, n.Version.PID, n.Started.Local().Format(time.DateTime), n.Containers, n.GPUs), "")
	switch n.Switch.Position {
	case api.SwitchRunning:
	case api.SwitchDisabled:
		add("gpufenced", "switch", doctor.Fail, switchSentence(n.Switch)+": nothing is enforced", "gpufence resume")
	default:
		add("gpufenced", "switch", doctor.Fail, switchSentence(n.Switch)+": containers with a GPU do not start", "gpufence resume")
	}
	if n.Mode != string(quota.ModeEnforce) {
		add("configuration", "mode", doctor.Warn, fmt.Sprintf("mode = %q: everything is computed and reported, nothing is enforced", n.Mode), `mode = "enforce" in `+n.Config.Path)
	}
	switch {
	case !n.Health.Live:
		add("gpufenced", "sampling", doctor.Fail, n.Health.Why, "systemctl restart gpufenced")
	case !n.Health.Ready && n.Switch.Position == api.SwitchRunning:
		add("gpufenced", "ready", doctor.Fail, n.Health.Why, "nvidia-smi says more")
	}
	for _, p := range n.Problems {
		add("gpufenced", p.About, doctor.Warn, fmt.Sprintf("%s (since %s)", p.Error, p.Since.Local().Format(time.DateTime)), "")
	}
	c := n.Config
	switch {
	case c.Error != nil && c.FromLastGood:
		add("configuration", "config.toml", doctor.Warn, c.Error.Error()+"; in force is the copy in "+c.LastGood, "mend the line, then gpufence reload")
	case c.Error != nil:
		add("configuration", "config.toml", doctor.Warn, c.Error.Error()+"; what was in force before goes on", "mend the line, then gpufence reload")
	case c.Path != "":
		add("configuration", "config.toml", doctor.OK, fmt.Sprintf("%s, read %s", c.Path, c.Loaded.Local().Format(time.DateTime)), "")
	}
	if len(c.NeedRestart) > 0 {
		add("configuration", "restart", doctor.Warn, "new values wait for a restart: "+strings.Join(c.NeedRestart, ", "), "systemctl restart gpufenced")
	}
	for _, s := range n.Drift {
		add("configuration", "drift", doctor.Fail, s, "put it back, or gpufence reload where it is meant")
	}
	for _, f := range n.Fences {
		s, fix := doctor.OK, ""
		switch {
		case f.State == "proven" || f.State == "delivered" || f.State == "seen":
		case f.Name == "watch":
			s, fix = doctor.Fail, "nvidia-smi, and the kernel's log, say more"
		default:
			s = doctor.Warn
		}
		what := fenceState(f)
		if f.Proof != "" {
			what += ": " + f.Proof
		}
		add("fence", f.Name, s, what, fix)
	}
	return out
}

func (a *app) doctorTable(ex examination) error {
	fmt.Fprintf(a.stdout, "level %s: %s\n\n", printable(ex.Level), levelSentence(ex.Level))
	t := newTable(a.stdout, "STATE", "AREA", "NAME", "WHAT")
	for _, f := range ex.Findings {
		t.row(string(f.State), f.Area, f.Name, f.What)
		if f.Fix != "" && f.State != doctor.OK {
			t.row(" ", " ", " ", "-> "+f.Fix)
		}
	}
	return t.flush()
}

func levelSentence(level string) string {
	switch level {
	case string(quota.LevelHard):
		return "what goes over its limit is refused by driver or kernel"
	case string(quota.LevelReactive):
		return "what goes over its limit and the slack is killed within a few samples"
	case string(quota.LevelAdvisory):
		return "only programs that load the shim are held"
	}
	return "nothing holds a container here now"
}
