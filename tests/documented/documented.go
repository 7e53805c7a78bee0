// SPDX-License-Identifier: Apache-2.0

// Package documented finds the commands that README.md and docs/ tell people to type, and says which
// suite runs those of which page. A suite runs its share with [Run]; the package's own tests refuse a
// page that nobody runs, an entry that no page needs any more, and commands that stand where they are
// not found.
//
// A command stands in a block ```console behind a prompt: "# " on the node, as root, "$ " inside a container.
// Lines without a prompt are what it prints.
package documented

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Root is the repository, as every test of a package two folders deep sees it.
const Root = "../.."

// Command is one that a page has, without its prompt and the remark behind it, on one line.
type Command struct {
	Page string
	Line int // of its page
	Text string
}

var (
	remark = regexp.MustCompile(`\s+# .*$`)
	fence  = regexp.MustCompile("^\\s*```(.*)$")
)

// Commands are those of a page, in their order.
func Commands(page string) ([]Command, error) {
	text, err := os.ReadFile(filepath.Join(Root, page))
	if err != nil {
		return nil, fmt.Errorf("read a page: %w", err)
	}
	// What stands in another form is for this package's own test.
	out, _ := parse(page, string(text))
	return out, nil
}

// parse finds the commands, and says what may hide some.
func parse(page, text string) ([]Command, error) {
	var out []Command
	var errs []error
	block, inside, more := "", false, false
	number, empty := 0, true
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimRight(line, "\n")
		if m := fence.FindStringSubmatch(line); m != nil {
			inside, more = !inside, false
			if inside {
				block = m[1]
				if block == "" || block == "sh" || block == "bash" || block == "shell" {
					errs = append(errs, fmt.Errorf("%s:%d: a block of kind %q: write console, with prompts, or say what else it is", page, number, block))
				}
			}
			empty = false
			continue
		}
		switch {
		case !inside && empty && strings.HasPrefix(line, "    "):
			errs = append(errs, fmt.Errorf("%s:%d: an indented block: write ```console, with prompts", page, number))
		case !inside || block != "console":
		case more:
			last := &out[len(out)-1]
			last.Text = strings.TrimSuffix(last.Text, `\`) + strings.TrimSpace(line)
		default:
			command, ok := strings.CutPrefix(line, "# ")
			if !ok {
				command, ok = strings.CutPrefix(line, "$ ")
			}
			if !ok {
				break
			}
			out = append(out, Command{Page: page, Line: number, Text: strings.TrimSpace(command)})
		}
		more = inside && block == "console" && len(out) > 0 && strings.HasSuffix(out[len(out)-1].Text, `\`)
		empty = strings.TrimSpace(line) == ""
	}
	for i := range out {
		out[i].Text = remark.ReplaceAllString(out[i].Text, "")
	}
	return out, errors.Join(errs...)
}

// Pages are README.md and those of docs/.
func Pages() ([]string, error) {
	found, err := filepath.Glob(filepath.Join(Root, "docs/*.md"))
	if err != nil || len(found) == 0 {
		return nil, fmt.Errorf("no pages in docs/: %w", err)
	}
	pages := []string{"README.md"}
	for _, f := range found {
		pages = append(pages, "docs/"+filepath.Base(f))
	}
	return pages, nil
}

// suites are the packages that run the commands of a page.
var suites = map[string]string{
	"README.md":               "tests/e2e",
	"docs/api.md":             "tests/e2e",
	"docs/cdi.md":             "tests/e2e",
	"docs/containerd.md":      "tests/engines",
	"docs/crio.md":            "tests/engines",
	"docs/docker.md":          "tests/engines",
	"docs/install.md":         "tests/packages",
	"docs/kubernetes.md":      "tests/k8s",
	"docs/metrics.md":         "tests/e2e",
	"docs/nerdctl.md":         "tests/engines",
	"docs/nri.md":             "tests/engines",
	"docs/numbers.md":         "tests/e2e",
	"docs/operation.md":       "tests/e2e",
	"docs/podman.md":          "tests/engines",
	"docs/resizing.md":        "tests/e2e",
	"docs/run.md":             "tests/engines",
	"docs/semantics.md":       "tests/engines",
	"docs/simulated-gpu.md":   "tests/e2e",
	"docs/troubleshooting.md": "tests/e2e",
	"docs/upgrade.md":         "tests/packages",
}

// others are commands that another suite than their page's runs: what they need is there.
var others = map[string]string{
	"dpkg -i dist/packages/gpufence_*_amd64.deb":                                         "tests/packages",
	"gpufence install --runtime containerd --restart-mode systemd":                       "tests/engines",
	"kubectl get pod notebook -o yaml | gpufence apply -f -":                             "tests/k8s",
	"helm install gpufence gpufence-VERSION.tgz --namespace gpufence --create-namespace": "tests/k8s",
}

// notRun are commands that nobody runs, and why. This is the whole list.
var notRun = map[string]string{
	"make demo":  "it builds into the folder that the tests run from; tests/demo runs what it starts",
	"make test":  "it is what runs the tests",
	"make build": "it builds into the folder that the tests run from, before they run",
	"cp packaging/systemd/gpufence.sysusers /usr/lib/sysusers.d/gpufence.conf && systemd-sysusers":                                               "it needs systemd; tests/packages installs the same files, and tests/packaging has systemd judge them",
	"cp packaging/systemd/gpufenced.{socket,service} /usr/lib/systemd/system/":                                                                   "as above",
	"systemctl enable --now gpufenced.socket gpufenced.service":                                                                                  "it needs systemd as the first process",
	"journalctl -u gpufenced GPUFENCE_EVENT=kill":                                                                                                "it needs systemd's journal",
	"journalctl GPUFENCE_CONTAINER=3f2a…":                                                                                                        "it needs systemd's journal",
	"docker run --rm --runtime gpufence --env NVIDIA_VISIBLE_DEVICES=all --annotation gpufence.dev/memory.max=4Gi my/cuda-app":                   "Debian's Docker has no --annotation",
	"nerdctl run --rm --runtime /usr/bin/gpufence-runtime --env NVIDIA_VISIBLE_DEVICES=all --annotation gpufence.dev/memory.max=4Gi my/cuda-app": "nerdctl cannot be had here; ctr runs the same with containerd's page",
	"make test-gpu": "it takes minutes; tests/hardware runs its parts on the simulated GPU",
	"make test-gpu TEST_GPU_FLAGS='--only guesses'": "as above",
	"make test-gpu-folder":                          "as above",
	"dist/test-gpu/run --out /tmp/report":           "as above",
}

// owner is the suite that runs a command, "" with the reason if none does.
func owner(c Command) (suite, why string) {
	if why, ok := notRun[c.Text]; ok {
		return "", why
	}
	if suite, ok := others[c.Text]; ok {
		return suite, ""
	}
	return suites[c.Page], ""
}

// Run runs a suite's share, each page as a subtest, in its order. begin is called for each page that has a command
// of the suite, and gives what runs them.
func Run(t *testing.T, suite string, begin func(t *testing.T, page string) func(command string) error) {
	t.Helper()
	pages, err := Pages()
	if err != nil {
		t.Fatal(err)
	}
	ran := false
	for _, page := range pages {
		commands, err := Commands(page)
		if err != nil {
			t.Error(err)
		}
		var mine []Command
		for _, c := range commands {
			if s, _ := owner(c); s == suite {
				mine = append(mine, c)
			}
		}
		if len(mine) == 0 {
			continue
		}
		ran = true
		t.Run(filepath.Base(page), func(t *testing.T) {
			run := begin(t, page)
			for _, c := range mine {
				if err := run(c.Text); err != nil {
					t.Errorf("%s:%d: %s: %v", c.Page, c.Line, c.Text, err)
				} else {
					t.Logf("ran: %s", c.Text)
				}
			}
		})
	}
	if !ran {
		t.Errorf("no page has a command for %s", suite)
	}
}
