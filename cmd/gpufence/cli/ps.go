// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
)

func (a *app) ps() *cobra.Command {
	var output string
	var all bool
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "list the containers with a GPU, their use and limits",
		Long: "ps lists the containers that gpufenced knows, one row for each of their GPUs.\n" +
			"CURRENT and PEAK are what counts against the limit; a number with a question mark is\n" +
			"old, since NVML does not answer. MAX is the lower of the container's and the pod's.",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			containers, err := a.client().Containers(cmd.Context())
			if err != nil {
				return err
			}
			if !all {
				containers = slices.DeleteFunc(containers, func(c api.Container) bool { return c.State == "ended" })
			}
			slices.SortStableFunc(containers, func(x, y api.Container) int {
				return cmp.Or(strings.Compare(x.Pod.Namespace, y.Pod.Namespace), strings.Compare(containerName(x), containerName(y)), x.PreparedAt.Compare(y.PreparedAt))
			})
			if output == "json" {
				if containers == nil {
					containers = []api.Container{} // an empty list, not null
				}
				return a.printJSON(containers)
			}
			return a.psTable(containers)
		},
	}
	outputFlag(cmd, &output, "table", "json")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that have ended not long ago")
	return cmd
}

func (a *app) psTable(containers []api.Container) error {
	t := newTable(a.stdout, "NAMESPACE", "CONTAINER", "ID", "STATE", "LEVEL", "GPU", "CURRENT", "PEAK", "MAX", "EVENTS", "FENCES")
	for _, c := range containers {
		for _, g := range c.GPUs {
			t.row(c.Pod.Namespace, containerName(c), shortID(c.Key.ID), c.State, string(c.Level), gpuName(g),
				size(g.Current, g.Known), size(g.Peak, true), limit(g.Limits.Max), strings.Join(eventCounts(g.Events, false), " "), fences(c.Fences))
		}
		if len(c.GPUs) == 0 {
			t.row(c.Pod.Namespace, containerName(c), shortID(c.Key.ID), c.State, string(c.Level), "", "", "", "", "", fences(c.Fences))
		}
	}
	return t.flush()
}
