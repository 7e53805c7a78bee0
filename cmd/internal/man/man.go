// SPDX-License-Identifier: Apache-2.0

// Package man writes manual pages of a command and its subcommands, from what their --help says.
package man

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Command is a hidden subcommand that writes the pages into a folder.
func Command(root *cobra.Command, version string) *cobra.Command {
	return &cobra.Command{
		Use: "man FOLDER", Short: "write manual pages into a folder", Hidden: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return quota.NewError(quota.CodeUsage, "man takes one folder, and %d were given", len(args))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return Write(args[0], root, version) },
	}
}

// Write makes one page of section 1 (8 for a daemon, which has no subcommands of its own) for each
// command that is shown in help.
func Write(dir string, root *cobra.Command, version string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write manual pages: %w", err)
	}
	section := "1"
	if strings.HasSuffix(root.Name(), "d") {
		section = "8"
	}
	return write(dir, root, section, version)
}

func write(dir string, cmd *cobra.Command, section, version string) error {
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
	if err := os.WriteFile(filepath.Join(dir, name+"."+section), []byte(Page(cmd, section, version)), 0o644); err != nil {
		return fmt.Errorf("write manual page: %w", err)
	}
	for _, c := range shown(cmd) {
		if err := write(dir, c, section, version); err != nil {
			return err
		}
	}
	return nil
}

func shown(cmd *cobra.Command) []*cobra.Command {
	var out []*cobra.Command
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" && c.Name() != "completion" {
			out = append(out, c)
		}
	}
	return out
}

// Page is one page in roff.
func Page(cmd *cobra.Command, section, version string) string {
	var b strings.Builder
	path := cmd.CommandPath()
	name := strings.ReplaceAll(path, " ", "-")
	fmt.Fprintf(&b, ".TH %s %s \"\" \"gpufence %s\" \"gpufence\"\n", quoted(strings.ToUpper(name)), section, escape(version))
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", escape(name), escape(cmd.Short))
	use := cmd.UseLine()
	if len(shown(cmd)) > 0 {
		use = path + " [command]"
	}
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", escape(use))
	long := cmd.Long
	if long == "" {
		long = cmd.Short
	}
	b.WriteString(".SH DESCRIPTION\n")
	text(&b, long)
	flags(&b, "OPTIONS", cmd.NonInheritedFlags())
	flags(&b, "GLOBAL OPTIONS", cmd.InheritedFlags())
	if cmd.Example != "" {
		fmt.Fprintf(&b, ".SH EXAMPLES\n.nf\n%s\n.fi\n", escape(strings.TrimPrefix(strings.ReplaceAll(cmd.Example, "\n  ", "\n"), "  ")))
	}
	var also []string
	if cmd.HasParent() {
		also = append(also, strings.ReplaceAll(cmd.Parent().CommandPath(), " ", "-"))
	}
	for _, c := range shown(cmd) {
		also = append(also, strings.ReplaceAll(c.CommandPath(), " ", "-"))
	}
	if len(also) > 0 {
		b.WriteString(".SH SEE ALSO\n")
		for i, n := range also {
			end := ","
			if i == len(also)-1 {
				end = ""
			}
			fmt.Fprintf(&b, ".BR %s (%s)%s\n", escape(n), section, end)
		}
	}
	return b.String()
}

func text(b *strings.Builder, s string) {
	for i, paragraph := range strings.Split(s, "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		fmt.Fprintln(b, escape(paragraph))
	}
}

func flags(b *strings.Builder, title string, set *pflag.FlagSet) {
	begun := false
	set.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		if !begun {
			begun = true
			fmt.Fprintf(b, ".SH %s\n", title)
		}
		kind, usage := pflag.UnquoteUsage(f)
		line := "\\fB\\-\\-" + escape(f.Name) + "\\fR"
		if f.Shorthand != "" {
			line = "\\fB\\-" + escape(f.Shorthand) + "\\fR, " + line
		}
		if kind != "" {
			line += " \\fI" + escape(kind) + "\\fR"
		}
		fmt.Fprintf(b, ".TP\n%s\n%s", line, escape(usage))
		if d := f.DefValue; d != "" && d != "false" && d != "0" && d != "0s" && d != "[]" {
			fmt.Fprintf(b, " (default %s)", escape(d))
		}
		b.WriteString("\n")
	})
}

// escape keeps text from being taken for a request, an escape or a dash of another kind.
func escape(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s)
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}

func quoted(s string) string { return `"` + strings.ReplaceAll(escape(s), `"`, `\(dq`) + `"` }
