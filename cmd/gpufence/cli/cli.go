// SPDX-License-Identifier: Apache-2.0

// Package cli is the command line of gpufence: what a person or a script asks gpufenced on its
// socket. It decides nothing; every rule is gpufenced's.
//
// What it promises: tables and sentences are for people and may change, `-o json` is what the
// API says and only grows. Answers go to stdout, everything else to stderr. An error is one
// sentence with a code of docs/errors.md. Exit status: 0 done; 1 refused, failed, or
// gpufenced not reachable; 2 the command line itself is wrong.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpufence/gpufence/cmd/internal/man"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/config"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// Exit statuses.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

// socketEnv names the socket where --socket does not.
const socketEnv = "GPUFENCE_SOCKET"

// app is what every command shares.
type app struct {
	socket string
	getenv func(string) string
	stdout io.Writer
	stderr io.Writer
}

// usagef is a command line that cannot be understood.
func usagef(format string, args ...any) error {
	return quota.NewError(quota.CodeUsage, format, args...)
}

// errSaid ends a command whose failure is on stderr, or in its answer, already.
var errSaid = errors.New("failed, and said so")

// Run executes one command line and returns the exit status.
func Run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	a := &app{getenv: getenv, stdout: stdout, stderr: stderr}
	root := a.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	switch {
	case errors.Is(err, errSaid):
	case ctx.Err() != nil && err.Error() == ctx.Err().Error():
		fmt.Fprintln(stderr, "gpufence: interrupted")
	default:
		fmt.Fprintln(stderr, oneSentence(err))
	}
	if errors.Is(err, quota.CodeUsage) {
		return exitUsage
	}
	return exitFailed
}

// oneSentence puts our name before an error that does not carry it, on one line.
func oneSentence(err error) string {
	s := strings.Join(strings.Fields(err.Error()), " ")
	if !strings.HasPrefix(s, "gpufence: ") {
		s = "gpufence: " + s
	}
	return s
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpufence",
		Short: "show and change the GPU memory limits of containers",
		Long: "gpufence shows and changes what gpufenced holds the containers of this node to.\n\n" +
			"CONTAINER is an id or an unambiguous beginning of one, a container's name, a pod's\n" +
			"name, or pod/container.",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return usagef("there is no command %q%s", args[0], nearest(cmd, args[0]))
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%s: see `%s --help`", err, cmd.CommandPath())
	})
	socket := a.getenv(socketEnv)
	if socket == "" {
		socket = config.Default().Socket
	}
	root.PersistentFlags().StringVar(&a.socket, "socket", socket, "gpufenced's socket; "+socketEnv+" also names it")
	root.AddCommand(a.ps(), a.inspect(), a.set(), a.apply(os.Stdin), a.events(), a.why(), a.doctor(), a.reload(), a.quiesce(), a.resume(), a.disable(),
		a.cdi(), a.supportBundle(), a.run(), a.canary(), a.canaryInside(), a.lint(os.Stdin), a.install(), a.uninstall(), a.demo(), a.version(), man.Command(root, api.BuildVersion))
	return root
}

// nearest says which command was probably meant.
func nearest(root *cobra.Command, word string) string {
	if root.SuggestionsMinimumDistance <= 0 {
		root.SuggestionsMinimumDistance = 2
	}
	if s := root.SuggestionsFor(word); len(s) > 0 {
		return fmt.Sprintf(": did you mean %q?", s[0])
	}
	return ": see `gpufence --help`"
}

// client talks to gpufenced; it does not wait for one that is not there, since a person can
// decide that better.
func (a *app) client() *api.Client { return api.NewClient(a.socket, 0) }

// exactly takes n arguments, named in the sentence.
func exactly(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		return usagef("%s takes %s, and %d were given: see `%s --help`", cmd.Name(), what, len(args), cmd.CommandPath())
	}
}

// outputFlag adds -o with the formats that the command knows, the first one the default.
func outputFlag(cmd *cobra.Command, into *string, formats ...string) {
	cmd.Flags().StringVarP(into, "output", "o", formats[0], "how to print: "+strings.Join(formats, ", "))
	err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // the flag was added two lines above
	}
	check := func(*cobra.Command, []string) error {
		for _, f := range formats {
			if *into == f {
				return nil
			}
		}
		return usagef("%s cannot print %q: -o takes %s", cmd.Name(), *into, strings.Join(formats, ", "))
	}
	cmd.PreRunE = check
}

func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.stdout)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print answer: %w", err)
	}
	return nil
}

// completeContainer offers the names of containers that can be looked at; without gpufenced it
// offers nothing, which is all that a shell can use.
func (a *app) completeContainer(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	containers, err := a.client().Containers(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, c := range containers {
		names = append(names, c.Key.ID)
		if c.Name != "" && c.Pod.Name != "" {
			names = append(names, c.Pod.Name+"/"+c.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
