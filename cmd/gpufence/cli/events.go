// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
)

func (a *app) events() *cobra.Command {
	var output, since string
	var follow bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "show what happened: refusals, kills, resizes, starts and ends",
		Long: "events prints gpufenced's journal, oldest first.\n\n" +
			"--since takes the number of an event (what came after it), a time span (10m) or a\n" +
			"time (2006-01-02T15:04:05Z). -o json prints one event a line.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			seq, from, err := parseSince(since, time.Now())
			if err != nil {
				return err
			}
			err = a.client().Events(cmd.Context(), seq, follow, func(ev api.Event) error {
				if ev.Time.Before(from) {
					return nil
				}
				return a.printEvent(ev, output)
			})
			if follow && errors.Is(err, context.Canceled) {
				err = nil // Ctrl-C is how following ends
			}
			return err
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with new events until interrupted")
	cmd.Flags().StringVar(&since, "since", "0", "only events after this number, in this last time span, or since this time")
	return cmd
}

// parseSince tells an event's number from a time.
func parseSince(s string, now time.Time) (seq uint64, from time.Time, err error) {
	if seq, err := strconv.ParseUint(s, 10, 64); err == nil {
		return seq, time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d > 0 {
		return 0, now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return 0, t, nil
	}
	return 0, time.Time{}, usagef("--since %q is neither a number nor a time: write 42, 10m or 2006-01-02T15:04:05Z", s)
}

func (a *app) printEvent(ev api.Event, output string) error {
	if output == "json" {
		if err := json.NewEncoder(a.stdout).Encode(ev); err != nil {
			return fmt.Errorf("print event: %w", err)
		}
		return nil
	}
	kind := ev.Type
	if ev.Code != "" {
		kind += " " + ev.Code
	}
	line := fmt.Sprintf("%s  #%d  %s  %s", ev.Time.Local().Format("2006-01-02 15:04:05.000"), ev.Seq, kind, eventSubject(ev))
	if _, err := fmt.Fprintf(a.stdout, "%s  %s\n", printable(strings.TrimRight(line, " ")), printable(ev.Message)); err != nil {
		return fmt.Errorf("print event: %w", err)
	}
	return nil
}

// eventSubject is whom an event is about: namespace/pod/container, or as much as is known.
func eventSubject(ev api.Event) string {
	var parts []string
	if ev.Pod != nil {
		for _, p := range []string{ev.Pod.Namespace, ev.Pod.Name} {
			if p != "" {
				parts = append(parts, p)
			}
		}
	}
	if ev.Name != "" {
		parts = append(parts, ev.Name)
	}
	if len(parts) == 0 && ev.Container != nil {
		parts = append(parts, shortID(ev.Container.ID))
	}
	if len(parts) == 0 && ev.GPU != "" {
		parts = append(parts, ev.GPU)
	}
	return strings.Join(parts, "/")
}
