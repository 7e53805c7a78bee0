// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"path/filepath"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// Command is a low-level runtime's command line as far as a wrapper must understand it.
type Command struct {
	Name      string // "create", "run", "restore", ...; empty if there is none
	ID        string // the container's, of commands that create
	Bundle    string // as given; empty means the working directory
	Config    string // crun's --config of create and run: a file instead of the bundle's config.json
	Root      string // --root
	Log       string // --log
	LogFormat string // --log-format
	Help      bool   // asks for help or a version: creates nothing, whatever else is there
}

// Creates says whether the command makes a container out of a bundle.
func (c Command) Creates() bool {
	switch c.Name {
	case "create", "run", "restore":
		return !c.Help
	}
	return false
}

// BundleDir is the absolute bundle directory; cwd is the process's working directory.
func (c Command) BundleDir(cwd string) string {
	switch {
	case c.Bundle == "":
		return filepath.Clean(cwd)
	case filepath.IsAbs(c.Bundle):
		return filepath.Clean(c.Bundle)
	}
	return filepath.Join(cwd, c.Bundle)
}

// ConfigPath is the absolute path of the container's configuration.
func (c Command) ConfigPath(cwd string) string {
	switch {
	case c.Config == "":
		return filepath.Join(c.BundleDir(cwd), "config.json")
	case filepath.IsAbs(c.Config):
		return filepath.Clean(c.Config)
	}
	return filepath.Join(cwd, c.Config)
}

// Flags of runc, crun and youki, without dashes: true if the flag takes a value. Those that
// are in neither table are judged by what follows them.
var (
	globalFlags = map[string]bool{
		"log": true, "log-format": true, "log-level": true, "root": true, "r": true, "l": true, "criu": true,
		"rootless": true, "cgroup-manager": true,
		"debug": false, "systemd-cgroup": false, "s": false, "help": false, "h": false, "version": false,
		"v": false, "V": false, "usage": false,
	}
	createFlags = map[string]bool{
		"bundle": true, "b": true, "console-socket": true, "pid-file": true, "pidfd-socket": true, "preserve-fds": true,
		"config": true, "f": true,
		"no-pivot": false, "no-new-keyring": false, "detach": false, "d": false, "keep": false,
		"no-subreaper": false, "help": false, "h": false, "no-new-privs": false, "usage": false,
		// restore
		"image-path": true, "work-path": true, "manage-cgroups-mode": true, "empty-ns": true,
		"lsm-profile": true, "lsm-mount-context": true,
		"tcp-established": false, "tcp-close": false, "ext-unix-sk": false, "shell-job": false,
		"file-locks": false, "auto-dedup": false, "lazy-pages": false, "link-remap": false,
	}
	commands = map[string]bool{
		"checkpoint": true, "create": true, "delete": true, "events": true, "exec": true, "features": true,
		"help": true, "h": true, "kill": true, "list": true, "mounts": true, "pause": true, "ps": true,
		"restore": true, "resume": true, "run": true, "spec": true, "start": true, "state": true,
		"update": true, "init": true, "info": true, "completion": true,
	}
)

// ParseArgs reads the arguments after the program's name the way runc does: global flags,
// a command, then its flags and its container id in any order; a flag with one dash or two,
// its value in the next word or after "="; the last of several wins; "--" ends the flags.
//
// Only a command that creates and has no recognisable id is an error: everything else that
// looks odd is left for the low-level runtime to judge.
func ParseArgs(args []string) (Command, error) {
	var c Command
	i := 0
	for ; i < len(args); i++ {
		name, value, hasValue := splitFlag(args[i])
		if name == "" {
			break
		}
		takes, known := globalFlags[name]
		if !known {
			// A flag of a runtime that we do not know: its value is a word that is no command.
			takes = i+1 < len(args) && !commands[args[i+1]] && !isFlag(args[i+1])
		}
		if takes && !hasValue {
			if i+1 >= len(args) {
				return c, nil
			}
			i++
			value = args[i]
		}
		switch name {
		case "log", "l": // youki's and crun's short forms are not runc's, and name the same
			c.Log = value
		case "log-format":
			c.LogFormat = value
		case "root", "r":
			c.Root = value
		case "help", "h", "version", "v", "V", "usage":
			c.Help = c.Help || !hasValue || isTrue(value)
		}
	}
	if i < len(args) && args[i] == "--" {
		i++
	}
	if i >= len(args) {
		return c, nil
	}
	c.Name = args[i]
	if !c.Creates() {
		return c, nil
	}
	return parseCreate(c, args[i+1:])
}

func parseCreate(c Command, args []string) (Command, error) {
	var words []string  // that are the id, or should not be there
	var unsure []string // words after an unknown flag: its value, or the id
	for i := 0; i < len(args); i++ {
		if args[i] == "--" {
			words = append(words, args[i+1:]...)
			break
		}
		name, value, hasValue := splitFlag(args[i])
		if name == "" {
			words = append(words, args[i])
			continue
		}
		takes, known := createFlags[name]
		if !known && mayNameFile(args[i], name) {
			return c, quota.NewError(quota.CodeUsage, "cannot tell which configuration %s of `%s` means", quota.Quote(args[i]), c.Name).
				WithHint("write --bundle DIR or --config FILE")
		}
		if !known && !hasValue && i+1 < len(args) && !isFlag(args[i+1]) {
			i++
			unsure = append(unsure, args[i])
			continue
		}
		if takes && !hasValue {
			if i+1 >= len(args) {
				break // the runtime will say that the value is missing
			}
			i++
			value = args[i]
		}
		switch name {
		case "bundle", "b":
			c.Bundle = value
		case "config", "f":
			c.Config = value
		case "help", "h", "usage":
			c.Help = c.Help || !hasValue || isTrue(value)
		}
	}
	if c.Help {
		return c, nil
	}
	if len(words) == 0 && len(unsure) == 1 {
		words = unsure // the flag before it takes no value
	}
	if len(words) != 1 || words[0] == "" {
		return c, quota.NewError(quota.CodeUsage, "cannot tell the container's id in the arguments of `%s`", c.Name).
			WithHint("give exactly one")
	}
	c.ID = words[0]
	return c, nil
}

// mayNameFile says whether a flag that is in no table is crun's --bundle or --config, cut short or with its value glued
// on, as getopt takes them: we would fence another configuration than the one that is started.
func mayNameFile(arg, name string) bool {
	glued := !strings.HasPrefix(arg, "--") && (name[0] == 'b' || name[0] == 'f')
	return glued || strings.HasPrefix("bundle", name) || strings.HasPrefix("config", name)
}

// splitFlag takes "-name", "--name", "-name=value" and "--name=value" apart; name is empty
// for anything else, "-" and "--" included.
func splitFlag(arg string) (name, value string, hasValue bool) {
	if !isFlag(arg) {
		return "", "", false
	}
	s := strings.TrimPrefix(strings.TrimPrefix(arg, "-"), "-")
	name, value, hasValue = strings.Cut(s, "=")
	return name, value, hasValue
}

func isFlag(arg string) bool {
	return len(arg) > 1 && arg[0] == '-' && arg != "--"
}

func isTrue(s string) bool {
	switch s {
	case "1", "t", "T", "true", "TRUE", "True":
		return true
	}
	return false
}
