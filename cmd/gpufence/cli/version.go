// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/enforcer/api"
)

// versions is what `version -o json` prints. Daemon is missing where gpufenced does not answer.
type versions struct {
	Client string       `json:"client"`
	Daemon *api.Version `json:"daemon,omitempty"`
	Error  string       `json:"error,omitempty"`
}

func (a *app) version() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:               "version",
		Short:             "print the versions of gpufence and of the gpufenced that answers",
		Args:              exactly(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: api.BuildVersion}
			daemon, err := a.client().Version(cmd.Context())
			switch {
			case err == nil:
				v.Daemon = &daemon
			case errors.Is(err, api.ErrUnreachable):
				v.Error = oneSentence(err) // one's own version is worth an answer on a node without gpufenced
			default:
				return err
			}
			if output == "json" {
				return a.printJSON(v)
			}
			fmt.Fprintf(a.stdout, "gpufence %s\n", v.Client)
			if v.Daemon == nil {
				fmt.Fprintf(a.stdout, "gpufenced does not answer on %s\n", a.socket)
				return nil
			}
			fmt.Fprintf(a.stdout, "gpufenced %s, API %s, pages %d.%d, pid %d", v.Daemon.Version, v.Daemon.API, v.Daemon.ABIMajor, v.Daemon.ABIMinor, v.Daemon.PID)
			if v.Daemon.Driver != "" {
				fmt.Fprintf(a.stdout, ", driver %s", v.Daemon.Driver)
			}
			fmt.Fprintln(a.stdout)
			return nil
		},
	}
	outputFlag(cmd, &output, "table", "json")
	return cmd
}
