// SPDX-License-Identifier: Apache-2.0

// Package unchanged runs everyday programs without the shim and with it, and compares what they
// print and how they end, byte for byte. The list is commands.toml, and so are the few things
// that are left out of the comparison: what differs between two runs without the shim (the test
// checks that it does), the lines that name the shim where a command's job is to list libraries,
// and the known exceptions, which are tested to be exactly what they are known to be.
//
// Each run has namespaces of its own, whose files are this machine's, with the shim delivered as
// in a container: by /etc/ld.so.preload, with real pages beside it; and once more by LD_PRELOAD.
// The machine's own /etc is not touched.
package unchanged

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// least is how many commands the list must have.
const least = 60

// preload is the shim's path in a container.
const preload = "/dev/gpufence/$LIB/libgpufence.so"

// hangs is how long a command may take.
const hangs = 2 * time.Minute

type program struct {
	Name     string
	Packages []string
	Build    string
}

type command struct {
	Name      string
	Run       string
	Packages  []string
	Programs  []string
	Filter    [][2]string
	Shows     bool
	Exception *exception
}

// exception is how a command differs with the shim.
type exception struct {
	Mode   mode // where; "both" for both
	Reason string
	Stdout string // a regular expression; all of it
	Stderr string
	Status int
}

// mode is how the shim comes to a command.
type mode string

const (
	none mode = "none"
	file mode = "file"
	env  mode = "env"
)

type list struct {
	Program []program
	Command []command
}

func readList(t *testing.T) list {
	t.Helper()
	text, err := os.ReadFile("commands.toml")
	if err != nil {
		t.Fatal(err)
	}
	var l list
	d := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		t.Fatal(err)
	}
	return l
}

// result is what a command did.
type result struct {
	Stdout, Stderr string
	Status         int
}

func TestListIsWhole(t *testing.T) {
	l := readList(t)
	if len(l.Command) < least {
		t.Errorf("%d commands, want at least %d", len(l.Command), least)
	}
	programs, used := map[string]bool{}, map[string]bool{}
	for _, p := range l.Program {
		if programs[p.Name] {
			t.Errorf("two programs %q", p.Name)
		}
		programs[p.Name] = true
	}
	names := map[string]bool{}
	for _, c := range l.Command {
		if names[c.Name] || c.Name == "" || c.Run == "" {
			t.Errorf("two commands %q, or an empty one", c.Name)
		}
		names[c.Name] = true
		for _, p := range c.Programs {
			if !programs[p] {
				t.Errorf("%s: no program %q", c.Name, p)
			}
			used[p] = true
		}
		if e := c.Exception; e != nil && (e.Reason == "" || !slices.Contains([]mode{file, env, "both"}, e.Mode)) {
			t.Errorf("%s: an exception needs a reason, and a mode that is file, env or both", c.Name)
		}
	}
	for p := range programs {
		if !used[p] {
			t.Errorf("no command runs %q", p)
		}
	}
}

// place is what all runs share.
type place struct {
	dir, pages, programs string
	etc                  map[mode]string
	preload              string // what LD_PRELOAD is in mode env
}

// missing skips, or fails where nothing may be skipped.
func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf(format, args...)
	}
	t.Skipf("SKIP: "+format, args...)
}

// absent are the Debian packages of a list that are not installed.
func absent(ctx context.Context, packages []string) []string {
	var out []string
	for _, p := range packages {
		text, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${db:Status-Status}", p).Output()
		if err != nil || string(text) != "installed" {
			out = append(out, p)
		}
	}
	return out
}

func newPlace(t *testing.T) *place {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "namespaces and programs of other users need root")
	}
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist = filepath.Join("..", "..", "dist")
	}
	dist, err := filepath.Abs(dist)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	p := &place{dir: dir, pages: filepath.Join(dir, "pages"), programs: filepath.Join(dir, "programs"), preload: preload,
		etc: map[mode]string{none: filepath.Join(dir, "etc"), file: filepath.Join(dir, "etc-preload")}}
	p.etc[env] = p.etc[none]
	if err := os.Mkdir(p.programs, 0o755); err != nil {
		t.Fatal(err)
	}
	// A sanitizer names the source by the path that the compiler was given. A relative one is the
	// same wherever this repository lies, also in a folder that is called gpufence.
	if err := os.CopyFS(filepath.Join(p.programs, "source"), os.DirFS("programs")); err != nil {
		t.Fatal(err)
	}
	p.makePages(t, dist)
	for _, etc := range []string{p.etc[none], p.etc[file]} {
		if out, err := exec.CommandContext(t.Context(), "cp", "-a", "/etc", etc).CombinedOutput(); err != nil {
			t.Fatalf("copy /etc: %v: %s", err, out)
		}
		if err := os.Remove(filepath.Join(etc, "ld.so.preload")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(p.etc[file], "ld.so.preload"), []byte(preload+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return p
}

// makePages makes what becomes /dev/gpufence: the pages, and the library under the spellings of
// $LIB.
func (p *place) makePages(t *testing.T, dist string) {
	t.Helper()
	const gib = uint64(1) << 30
	uuid, err := ledger.ParseUUID("GPU-5a1e0000-0000-4000-8000-000000000001")
	if err != nil {
		t.Fatal(err)
	}
	pod, err := ledger.CreatePod(filepath.Join(p.dir, "pod"), ledger.Options{Plain: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pod.Close() }) // the folder goes
	c, err := pod.AddContainer("c", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	limits := ledger.Limits{Generation: 1, GPU: []ledger.LimitsGPU{{
		UUID: uuid, Present: true, Fenced: true, TotalBytes: 16 * gib, ContextBytes: gib / 4, MaxBytes: 4 * gib, HighBytes: quota.Unlimited,
		PodMaxBytes: quota.Unlimited, PodHighBytes: quota.Unlimited,
	}}}
	if err := errors.Join(c.Publish(limits), c.Beat()); err != nil {
		t.Fatal(err)
	}
	for folder, lib := range map[string]string{
		"lib64": "libgpufence.so", "lib/x86_64-linux-gnu": "libgpufence.so", "lib/aarch64-linux-gnu": "libgpufence.so",
		"lib32": "libgpufence32.so", "lib/i386-linux-gnu": "libgpufence32.so",
	} {
		if err := copyTo(filepath.Join(dist, "lib", lib), filepath.Join(p.pages, folder, "libgpufence.so"), 0o755); err != nil {
			t.Fatalf("run make build first: %v", err)
		}
	}
	for from, to := range map[string]string{filepath.Join(c.Dir(), ledger.LimitsName): ledger.LimitsName, pod.LedgerPath(): ledger.LedgerName} {
		if err := copyTo(from, filepath.Join(p.pages, to), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(p.pages, 0o755); err != nil {
		t.Fatal(err)
	}
}

func copyTo(from, to string, perm fs.FileMode) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(to, text, perm); err != nil {
		return err
	}
	return os.Chmod(to, perm)
}

// build makes a program; its error is a reason not to run what needs it.
func (p *place) build(ctx context.Context, pr program) error {
	if gone := absent(ctx, pr.Packages); len(gone) > 0 {
		return fmt.Errorf("the program %s cannot be built without %s", pr.Name, strings.Join(gone, ", "))
	}
	cmd := exec.CommandContext(ctx, "/bin/sh", "-euc", pr.Build)
	cmd.Dir = p.programs
	cmd.Env = append(os.Environ(), "SRC=source")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", pr.Name, err, out)
	}
	return nil
}

// run executes a command once.
func (p *place) run(t *testing.T, c command, m mode) result {
	t.Helper()
	output, err := os.MkdirTemp(p.dir, "output-")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), hangs)
	defer cancel()
	shim := ""
	if m == env {
		shim = p.preload
	}
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "private",
		"/bin/sh", "./enter.sh", p.pages, p.etc[m], p.programs, output, shim, c.Run)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/srv", "LANG=C.UTF-8", "TERM=dumb", "TZ=UTC0", "USER=root", "LOGNAME=root"}
	said, err := cmd.CombinedOutput()
	r := result{}
	for name, into := range map[string]*string{"stdout": &r.Stdout, "stderr": &r.Stderr} {
		text, readErr := os.ReadFile(filepath.Join(output, name))
		err = errors.Join(err, readErr)
		*into = string(text)
	}
	text, readErr := os.ReadFile(filepath.Join(output, "status"))
	err = errors.Join(err, readErr)
	if err == nil {
		r.Status, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		t.Fatalf("run it (%s): %v: %s%s", m, err, said, r.Stderr)
	}
	if err := os.RemoveAll(output); err != nil {
		t.Fatal(err)
	}
	return r
}

// filtered leaves out what the rules name, but for one of them, if left is not negative.
func (c command) filtered(r result, left int) result {
	for i, rule := range c.Filter {
		if i == left {
			continue
		}
		re := regexp.MustCompile(rule[0])
		r.Stdout, r.Stderr = re.ReplaceAllString(r.Stdout, rule[1]), re.ReplaceAllString(r.Stderr, rule[1])
	}
	return r
}

// withoutOurs drops the lines that name the shim.
func withoutOurs(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		if !strings.Contains(line, "gpufence") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func (c command) check(t *testing.T, p *place) {
	t.Helper()
	first, second := p.run(t, c, none), p.run(t, c, none)
	want := c.filtered(first, -1)
	if diff := cmp.Diff(want, c.filtered(second, -1)); diff != "" {
		t.Fatalf("two runs without the shim differ: the filter is not enough:\n%s", diff)
	}
	for i, rule := range c.Filter {
		if cmp.Equal(c.filtered(first, i), c.filtered(second, i)) {
			t.Errorf("two runs without the shim are the same without the filter %q: it is not needed", rule[0])
		}
	}
	if want.Stdout == "" && want.Stderr == "" {
		t.Error("it prints nothing: nothing is compared")
	}
	if strings.Contains(want.Stdout+want.Stderr, "gpufence") {
		t.Errorf("it names the shim without it: %+v", want)
	}
	for _, m := range []mode{file, env} {
		got := c.filtered(p.run(t, c, m), -1)
		if e := c.Exception; e != nil && (e.Mode == m || e.Mode == "both") {
			if got.Status != e.Status || !matches(e.Stdout, got.Stdout) || !matches(e.Stderr, got.Stderr) {
				t.Errorf("%s: the exception is not what it is known to be: %+v", m, got)
			}
			continue
		}
		if c.Shows {
			named := strings.Contains(got.Stdout+got.Stderr, "gpufence")
			got.Stdout, got.Stderr = withoutOurs(got.Stdout), withoutOurs(got.Stderr)
			if !named {
				t.Errorf("%s: it does not show the shim: was it there?", m)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: with the shim it is not the same (- without, + with):\n%s", m, diff)
		}
	}
}

func matches(pattern, text string) bool {
	return regexp.MustCompile(`\A(?:` + pattern + `)\z`).MatchString(text)
}

func TestCommandsAreUnchanged(t *testing.T) {
	l := readList(t)
	p := newPlace(t)
	unusable := map[string]error{}
	for _, pr := range l.Program {
		unusable[pr.Name] = p.build(t.Context(), pr)
	}
	// The shim must be there, or all of this is the same for no reason.
	loaded := command{Run: "grep -c libgpufence /proc/self/maps"}
	for m, want := range map[mode]bool{none: false, file: true, env: true} {
		if got := p.run(t, loaded, m); (got.Status == 0) != want {
			t.Fatalf("%s: the shim is loaded: %v: %+v", m, !want, got)
		}
	}
	// And a library that does something must be seen.
	noisy := *p
	noisy.preload = "/opt/wrapper.so"
	if plain, got := p.run(t, command{Run: "/opt/caller"}, none), noisy.run(t, command{Run: "/opt/caller"}, env); unusable["wrapper"] == nil && cmp.Equal(plain, got) {
		t.Fatalf("a noisy library is not seen: %+v", got)
	}
	t.Run("commands", func(t *testing.T) {
		for _, c := range l.Command {
			t.Run(c.Name, func(t *testing.T) {
				t.Parallel()
				if gone := absent(t.Context(), c.Packages); len(gone) > 0 {
					missing(t, "no %s", strings.Join(gone, ", "))
				}
				for _, name := range c.Programs {
					if err := unusable[name]; err != nil {
						missing(t, "%v", err)
					}
				}
				c.check(t, p)
			})
		}
	})
}
