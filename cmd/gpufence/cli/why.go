// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// explanation is what `why -o json` prints.
type explanation struct {
	Event api.Event `json:"event"`
	Rule  string    `json:"rule"`           // what gpufenced goes by in such a case
	Mend  string    `json:"mend,omitempty"` // what whoever is hit can do
	Title string    `json:"code_title,omitempty"`
	// Related are other entries of the same act, in their order.
	Related []api.Event `json:"related,omitempty"`
}

// rules say by what gpufenced acted, and what can be done.
var rules = map[string]struct{ rule, mend string }{
	"kill-decided":      {"a container is killed that holds more than memory.max and the slack in two samples in a row that began at least kill-interval apart, counting live processes only; of a pod over its limit, the container above its own limit first, then the largest", "raise gpufence.dev/memory.max (`gpufence set` while it runs), or make the program use less"},
	"would-kill":        {"as for a kill, but nothing is enforced here (mode, or `gpufence disable`)", "raise gpufence.dev/memory.max, or make the program use less"},
	"kill-withheld":     {"as for a kill, but the death of an MPS client can fault its peers", "kill-mps = true, if that is wanted"},
	"gate-refused":      {"the kernel refuses a managed container what is above its limit, devices that it was not granted, and requests that cannot be weighed; the first of a second are told, all are counted", "see docs/gate.md: a program that loads the shim is refused earlier, with CUDA's own error"},
	"gate-would-refuse": {"as for a refusal of the gate, but it only counts here: policy, or a driver whose requests nobody has recorded; managed memory with gate-managed = \"audit\"", "gate = \"enforce\", if that is wanted: see docs/gate.md"},
	"gate-race":         {"a request was changed while the kernel read it, which no program does by accident: SIGKILL before it can use what it got", "find out what runs in that container"},
	"kill-failed":       {"SIGKILL was sent and the process is still there: it sleeps in the kernel, most likely in the driver", "see the kernel's log; the GPU may have to be reset"},
	"refused":           {"a container starts only if it can be fenced and its guarantee be kept", ""},
	"would-refuse":      {"as for a refusal, but the mode is not enforce", ""},
	"start-unfenced":    {"`gpufence disable` lets start what would be refused", "gpufence resume, and start it again"},
	"resize-failed":     {"a limit below what is in use is pending until the deadline; then every fence goes back to the old one", "make the program free memory, give more time (--deadline), or --force"},
	"resize":            {"growing is admitted at once, shrinking holds when the container has freed enough", ""},
	"unmanaged":         {"a process uses the GPU whose container did not come through gpufence", "run it through gpufence-runtime, end it, or name it in unmanaged-exempt"},
	"unattributed":      {"memory is in use that no process explains: it counts in admission, and nobody is killed for it", "look for managed memory and for processes in other pid namespaces"},
	"gpu-unknown":       {"on unknown data nobody is killed, and after 2 minutes no container starts", "see nvidia-smi and the kernel's log"},
	"stuck":             {"memory of an exited process that NVML still lists counts again after stuck-after", "see the kernel's log"},
	"config-wrong":      {"a wrong file never replaces one that was right", "mend the line, then `gpufence reload`"},
	"config-drift":      {"an engine's configuration was right and is not any more", "put it back; `gpufence doctor` has the line"},
	"hold-expired":      {"a prepared container that is not registered within prepare-hold gives its bytes back", ""},
	"quiesced":          {"NVML is let go; starts are refused until `gpufence resume`", ""},
	"disabled":          {"nothing is enforced until `gpufence resume`", ""},
	"kill":              {"SIGKILL was sent", ""},
	"kill-confirmed":    {"NVML does not list the memory any more", ""},
	"ended":             {"its cgroup is gone, or nothing lives in it any more", ""},
	"registered":        {"its fences were raised, and what they read back reaches the required level", ""},
	"prepared":          {"its limits were computed from its annotations and node policy, and its guarantee is held", ""},
	"ledger-broken":     {"a pod's ledger makes no sense: its shim accounting is not believed, the other fences hold", "restart the pod"},
	"throttled":         {"above memory.high a container whose processes do not load the shim is frozen for parts of the time (throttle = \"freeze\")", "use less, or raise gpufence.dev/memory.high"},
	"thawed":            {"a cgroup that an earlier gpufenced had frozen is let go when the next one starts", ""},
	"pages-lost":        {"the pages that a container shares with gpufenced are gone or cut: its shim goes on with what it has, watch holds it", "restart the container"},
	"ledger-whole":      {"a ledger that made no sense makes sense again", ""},
	"state-damaged":     {"what an earlier gpufenced left cannot be understood; it is kept aside, and costs its own pod only", "see run-dir/state, and restart the pod"},
	"started":           {"gpufenced was started, and took over what runs", ""},
	"gpus-found":        {"NVML was opened", ""},
	"unattributed-gone": {"the memory is explained again", ""},
	"config-drift-gone": {"the engines' configuration is as it was", ""},
	"gpu-known":         {"NVML answers completely again", ""},
	"config-loaded":     {"the configuration was read again", ""},
	"resumed":           {"every limit is enforced again", ""},
	"gpu-gone":          {"a GPU that containers were granted is not there any more, or its MIG mode was switched: nobody starts on it", "see nvidia-smi and the kernel's log; restart the containers on another GPU"},
	"degraded":          {"a fence that had been proven does not carry the whole limit any more; the others hold", "`gpufence inspect` has the fence's reason"},
	"restored":          {"a fence that had weakened is proven again", ""},
	"shim-absent":       {"a process uses the GPU without the shim for 5 s: it gets no refusals, and is held by the other fences", "`gpufence inspect` has the reason; programs linked statically or to musl cannot load it"},
	"kill-unconfirmed":  {"NVML still lists the memory long after SIGKILL", "see the kernel's log; the GPU may have to be reset"},
}

// interesting are the kinds of events that answer why about a container, best first by time.
var interesting = []string{"kill-decided", "kill-failed", "kill-withheld", "would-kill", "refused", "would-refuse", "start-unfenced", "resize-failed", "ledger-broken", "pages-lost", "state-damaged", "stuck", "throttled"}

func (a *app) why() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "why EVENT|CONTAINER",
		Short: "explain an event, or the last thing that happened to a container",
		Long: "why explains one entry of the journal: by what rule, with which numbers and thresholds, who else\n" +
			"was considered, and what can be done. EVENT is a number that `gpufence events` shows. For a\n" +
			"CONTAINER it explains its last kill, refusal or failure; also of one that ended or never started.",
		Example:           "  gpufence why 42\n  gpufence why notebook",
		Args:              exactly(1, "the number of an event, or a container"),
		ValidArgsFunction: a.completeContainer,
		RunE: func(cmd *cobra.Command, args []string) error {
			ex, err := a.explain(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if output == "json" {
				return a.printJSON(ex)
			}
			return a.whyTable(ex)
		},
	}
	outputFlag(cmd, &output, "table", "json")
	return cmd
}

func (a *app) explain(ctx context.Context, arg string) (explanation, error) {
	seq, numErr := strconv.ParseUint(arg, 10, 64)
	var key *api.ContainerKey
	if numErr != nil {
		c, err := a.client().Container(ctx, arg)
		switch {
		case err == nil:
			key = &c.Key
		case !errors.Is(err, quota.CodeNoSuchContainer):
			return explanation{}, err
		}
	}
	var found *api.Event
	byID := map[string][]api.Event{}
	about := 0
	err := a.client().Events(ctx, 0, false, func(ev api.Event) error {
		if ev.ID != "" {
			byID[ev.ID] = append(byID[ev.ID], ev)
		}
		switch {
		case numErr == nil:
			if ev.Seq == seq {
				found = &ev
			}
		case isAbout(&ev, key, arg):
			about++
			if slices.Contains(interesting, ev.Type) {
				found = &ev
			}
		}
		return nil
	})
	if err != nil {
		return explanation{}, err
	}
	switch {
	case found != nil:
	case numErr == nil:
		return explanation{}, quota.NewError(quota.CodeNoSuchEvent, "there is no event %d, or it is not kept any more", seq).WithHint("`gpufence events` lists those that are kept")
	case about > 0 || key != nil:
		return explanation{}, quota.NewError(quota.CodeNoSuchEvent, "nothing was killed, refused or failed about %.100q", arg).WithHint("`gpufence events` has what else happened")
	default:
		return explanation{}, quota.NewError(quota.CodeNoSuchContainer, "no container is called %.100q, and the journal knows none", arg).WithHint("`gpufence ps --all` lists them")
	}
	ex := explanation{Event: *found, Rule: rules[found.Type].rule, Mend: rules[found.Type].mend}
	for _, ev := range byID[found.ID] {
		if ev.Seq != found.Seq {
			ex.Related = append(ex.Related, ev)
		}
	}
	for _, c := range quota.Codes() {
		if string(c.Code) == found.Code {
			ex.Title = c.Title
		}
	}
	return ex, nil
}

// isAbout says whether an event is about a container that a person names so.
func isAbout(ev *api.Event, key *api.ContainerKey, name string) bool {
	if key != nil {
		return ev.Container != nil && *ev.Container == *key
	}
	var pod api.PodRef
	if ev.Pod != nil {
		pod = *ev.Pod
	}
	return ev.Container != nil && len(name) >= 4 && strings.HasPrefix(ev.Container.ID, name) ||
		name != "" && (ev.Name == name || pod.Name == name || pod.Name+"/"+ev.Name == name || pod.Namespace+"/"+pod.Name == name || pod.Namespace+"/"+pod.Name+"/"+ev.Name == name)
}

func (a *app) whyTable(ex explanation) error {
	ev := ex.Event
	t := newTable(a.stdout)
	t.row("event", fmt.Sprintf("#%d %s at %s", ev.Seq, ev.Type, ev.Time.Local().Format("2006-01-02 15:04:05.000")))
	t.row("about", eventSubject(ev))
	if ev.GPU != "" {
		t.row("gpu", ev.GPU)
	}
	t.row("what", ev.Message)
	if ex.Rule != "" {
		t.row("rule", ex.Rule)
	}
	for _, name := range slices.Sorted(maps.Keys(ev.Numbers)) {
		if !strings.HasSuffix(name, "_sample_ns") {
			t.row(strings.TrimSuffix(strings.TrimSuffix(name, "_bytes"), "_ns"), number(name, ev.Numbers[name]))
		}
	}
	first, second := ev.Numbers["first_sample_ns"], ev.Numbers["second_sample_ns"]
	if second > first && first > 0 {
		t.row("samples", fmt.Sprintf("two, %s apart", time.Duration(second-first).Round(time.Millisecond)))
	}
	for _, r := range ex.Related {
		line := fmt.Sprintf("#%d %s", r.Seq, r.Type)
		if r.Type == "kill" && r.MonotonicNS > 0 && first > 0 && uint64(r.MonotonicNS) > first {
			line += fmt.Sprintf(", SIGKILL %s after the first sample above the threshold", time.Duration(uint64(r.MonotonicNS)-first).Round(time.Millisecond))
		} else if r.Message != ev.Message {
			line += ", " + r.Message
		}
		t.row("also", line)
	}
	if ev.Code != "" {
		t.row("code", strings.TrimRight(ev.Code+" "+ex.Title, " ")+" (docs/errors.md)")
	}
	if ex.Mend != "" {
		t.row("mend", ex.Mend)
	}
	if err := t.flush(); err != nil {
		return err
	}
	if len(ev.Candidates) == 0 {
		return nil
	}
	fmt.Fprintln(a.stdout)
	t = newTable(a.stdout, "CANDIDATE", "USED", "MAX", "OVER")
	for i, c := range ev.Candidates {
		over := "no"
		if c.Max != quota.Unlimited && c.Used > c.Max {
			over = quota.HumanBytes(c.Used - c.Max)
		}
		name := c.Name
		if i == 0 {
			name += " (chosen)"
		}
		t.row(name, quota.HumanBytes(c.Used), limit(c.Max), over)
	}
	return t.flush()
}

// number is one of an event's numbers, in its unit.
func number(name string, v uint64) string {
	switch {
	case strings.HasSuffix(name, "_bytes"), name == "bytes":
		return limit(v)
	case strings.HasSuffix(name, "_ns"):
		return time.Duration(v).Round(time.Microsecond).String()
	}
	return strconv.FormatUint(v, 10)
}
