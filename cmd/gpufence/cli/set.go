// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// States of a resize.
const (
	statePending = "pending"
	stateFailed  = "ResizeFailed"
)

// lookEvery is how often a waiting set asks whether the resize has to wait.
const lookEvery = 100 * time.Millisecond

func (a *app) set() *cobra.Command {
	var (
		output   string
		req      api.SetRequest
		noWait   bool
		deadline time.Duration
	)
	cmd := &cobra.Command{
		Use:   "set CONTAINER KEY=VALUE...",
		Short: "change limits of a running container",
		Long: "set changes limits while the container runs, up or down, without a restart: memory.max,\n" +
			"memory.high, memory.min, memory.swap.max and memory.oom.group, several at once.\n\n" +
			"A memory.max or memory.min that grows is admitted or refused, after up to 5 s if memory\n" +
			"of exited processes is on its way back. Shrinking below what is in use is pending: new\n" +
			"allocations are refused, and the limit holds as soon as the container has freed\n" +
			"enough. At the deadline everything goes back to the old limit and the answer is\n" +
			"ResizeFailed with exit status 1; with --force the container is killed instead.\n" +
			"A container that is restarted goes back to its annotation.",
		Example: "  gpufence set notebook memory.max=6Gi\n  gpufence set notebook memory.high=4Gi memory.oom.group=false\n  gpufence set notebook memory.max=2Gi --deadline 5s",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return usagef("set takes a container and what to change: gpufence set CONTAINER memory.max=6Gi")
			}
			return nil
		},
		ValidArgsFunction: a.completeContainer,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if req.Values, err = keyValues(args[1:]); err != nil {
				return err
			}
			switch req.Scope {
			case "", "pod", "container":
			default:
				return usagef("there is no scope %q: --scope takes pod or container", req.Scope)
			}
			if cmd.Flags().Changed("deadline") && deadline < time.Millisecond {
				return usagef("a deadline of %s is too short: --deadline takes a time such as 5s", deadline)
			}
			req.DeadlineMillis = deadline.Milliseconds()
			req.Wait = !noWait
			return a.runSet(cmd.Context(), args[0], req, output)
		},
	}
	outputFlag(cmd, &output, "table", "json")
	f := cmd.Flags()
	f.StringVar(&req.Scope, "scope", "", "whose limit: pod or container (default: whichever has the memory.max)")
	f.BoolVar(&req.Force, "force", false, "kill the container if it does not free enough by the deadline")
	f.BoolVar(&noWait, "no-wait", false, "do not wait for the end of a pending resize")
	f.DurationVar(&deadline, "deadline", 0, "how long a shrink may be pending (default: node policy)")
	return cmd
}

// keyValues reads KEY=VALUE words; what the keys and values mean is gpufenced's to say.
func keyValues(words []string) (map[string]string, error) {
	values := map[string]string{}
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok || key == "" || value == "" {
			return nil, usagef("%q is not KEY=VALUE: write for example memory.max=6Gi", w)
		}
		if _, twice := values[key]; twice {
			return nil, usagef("%s is given twice: give it once", key)
		}
		values[key] = value
	}
	return values, nil
}

func (a *app) runSet(ctx context.Context, id string, req api.SetRequest, output string) error {
	client := a.client()
	looking, stop := context.WithCancel(ctx)
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		if req.Wait {
			a.sayPending(looking, client, id)
		}
	}()
	resp, err := client.Set(ctx, id, req)
	stop()
	<-looked
	if err != nil {
		return err
	}
	for _, n := range resp.Notices {
		fmt.Fprintln(a.stderr, "gpufence: note: "+n)
	}
	if output == "json" {
		err = a.printJSON(resp)
	} else {
		err = a.setTable(resp)
	}
	if err != nil {
		return err
	}
	for _, r := range resp.Resizes {
		if r.State == stateFailed {
			return errSaid // the answer has the state and the reason
		}
	}
	return nil
}

// sayPending tells a waiting person once that the resize has to wait, and for what.
func (a *app) sayPending(ctx context.Context, client *api.Client, id string) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c, err := client.Container(ctx, id)
		if err != nil {
			return // a courtesy only: the answer of Set itself tells what went wrong
		}
		if r := c.Resize; r != nil && r.State == statePending {
			fmt.Fprintln(a.stderr, "gpufence: "+printable(resizeSentence(*r)))
			return
		}
	}
}

func (a *app) setTable(resp api.SetResponse) error {
	t := newTable(a.stdout, "KEY", "GPU", "DESIRED", "ALLOCATED", "ACTUATED", "ACTUAL", "STATE", "WHY")
	for _, r := range resp.Resizes {
		t.row(keyOf(r), r.GPU, valueOf(r, r.Desired), valueOf(r, r.Allocated), valueOf(r, r.Actuated), valueOf(r, r.Actual), r.State, r.Why)
	}
	return t.flush()
}

// keyOf is which limit a resize is of; an older gpufenced knows of one only.
func keyOf(r api.Resize) string {
	if r.Key == "" {
		return quota.KeyMemoryMax
	}
	return r.Key
}

// valueOf is a number of a resize as a person reads it.
func valueOf(r api.Resize, v uint64) string {
	if r.Key == quota.KeyOOMGroup {
		return strconv.FormatBool(v != 0)
	}
	return limit(v)
}
