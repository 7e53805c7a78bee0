// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	older, newer = "v0.1.0", "v0.2.0"
	repository   = "../.."
)

// missing skips what cannot be tested here, or fails where everything must be.
func missing(t *testing.T, format string, args ...any) {
	t.Helper()
	if os.Getenv("GPUFENCE_MUST") == "1" {
		t.Fatalf("GPUFENCE_MUST=1, but "+format, args...)
	}
	t.Skipf("SKIPPED: "+format, args...)
}

func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			missing(t, "%s is not there (make test-packages installs it)", p)
		}
	}
}

// scratch outlives single tests; main removes it.
var scratch string

func TestMain(m *testing.M) {
	var err error
	if scratch, err = os.MkdirTemp("", "gpufence-packages-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(scratch); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// command runs one and returns both outputs together.
func command(ctx context.Context, dir string, env []string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out.String())
	}
	return out.String(), nil
}

func must(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := command(t.Context(), "", nil, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// release builds a work tree into a folder of scratch and returns that.
func release(source, name, work, version string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	nfpm, err := command(ctx, repository, nil, "tests/programs/build", "--path", "nfpm")
	if err != nil {
		return "", fmt.Errorf("nfpm is not built; run tests/programs/build nfpm: %w", err)
	}
	out := filepath.Join(scratch, name)
	argv := []string{
		"go", "run", "./packaging/release/cmd/release", "--out", out, "--work", filepath.Join(scratch, work), "--version", version,
		"--epoch", "1700000000", "--nfpm", filepath.Join(strings.TrimSpace(nfpm), "nfpm"),
	}
	start := time.Now()
	_, err = command(ctx, source, nil, append(argv, args...)...)
	fmt.Printf("built %s as %s in %.0f s\n", version, name, time.Since(start).Seconds())
	return out, err
}

// Each is built once, in this order, since they share what is made on the way.
var (
	first  = sync.OnceValues(func() (string, error) { return release(repository, "first", "work", older) })
	second = sync.OnceValues(func() (string, error) {
		if _, err := first(); err != nil {
			return "", err
		}
		return release(repository, "second", "work", newer, "--arch", runtime.GOARCH, "--format", "deb,rpm")
	})
)

func built(t *testing.T, which func() (string, error)) string {
	t.Helper()
	dir, err := which()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func one(t *testing.T, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(found) != 1 {
		t.Fatalf("%d files %s in %s (%v), want 1", len(found), pattern, dir, err)
	}
	return found[0]
}

// copyTree copies what git knows of the work tree, and what it would know, to another folder.
func copyTree(t *testing.T, to string) {
	t.Helper()
	list, err := exec.CommandContext(t.Context(), "git", "-C", repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Fatalf("list files of the work tree: %v", err)
	}
	for name := range strings.SplitSeq(string(list), "\x00") {
		if name == "" {
			continue
		}
		from := filepath.Join(repository, name)
		info, err := os.Lstat(from)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed and not committed
		}
		if err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(to, name)
		if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
			t.Fatal(err)
		}
		if info.Mode()&os.ModeSymlink != 0 {
			link, err := os.Readlink(from)
			if err == nil {
				err = os.Symlink(link, target)
			}
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err := copyFile(from, target, info.Mode().Perm()&^0o077|0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, mode)
	if err == nil {
		_, err = io.Copy(out, in)
		err = errors.Join(err, out.Close())
	}
	return errors.Join(err, in.Close())
}

// TestTwiceTheSame: another folder, other modes, another time, objects of C built anew.
func TestTwiceTheSame(t *testing.T) {
	need(t, "aarch64-linux-gnu-gcc", "git")
	one := built(t, first)
	source := filepath.Join(scratch, "a copy", "elsewhere")
	source = strings.ReplaceAll(source, " ", "-") // make takes no blanks
	copyTree(t, source)
	again, err := release(source, "again", "other-work", older)
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(one, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(filepath.Join(again, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(sums, other) {
		t.Errorf("two builds differ:\n%s\n%s", sums, other)
	}
	// 6 packages, the chart, the image, 4 SBOMs, the bundle.
	if n := bytes.Count(sums, []byte("\n")); n != 13 {
		t.Errorf("%d files in SHA256SUMS, want 13:\n%s", n, sums)
	}
	if out, err := command(t.Context(), again, nil, "sha256sum", "--strict", "-c", "SHA256SUMS"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	entries, err := os.ReadDir(again)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%9.1f MiB  %s", float64(info.Size())/(1<<20), e.Name())
	}
}

func TestOfflineBundle(t *testing.T) {
	dir := t.TempDir()
	must(t, "tar", "-C", dir, "-xf", one(t, built(t, first), "*-offline.tar"))
	bundle := one(t, dir, "gpufence-0.1.0-offline")
	if out, err := command(t.Context(), bundle, nil, "sha256sum", "--strict", "-c", "SHA256SUMS"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	entries, err := os.ReadDir(bundle)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	want := []string{
		"SHA256SUMS", "gpufence-0.1.0-1.aarch64.rpm", "gpufence-0.1.0-1.x86_64.rpm", "gpufence-0.1.0-linux-amd64.cdx.json", "gpufence-0.1.0-linux-amd64.tar.gz",
		"gpufence-0.1.0-linux-arm64.cdx.json", "gpufence-0.1.0-linux-arm64.tar.gz", "gpufence-0.1.0.tgz", "gpufence-image-0.1.0-amd64.cdx.json",
		"gpufence-image-0.1.0-arm64.cdx.json", "gpufence-image-0.1.0.tar", "gpufence_0.1.0_amd64.deb", "gpufence_0.1.0_arm64.deb", "install.md",
	}
	if !slices.Equal(names, want) {
		t.Errorf("the bundle holds\n%q, want\n%q", names, want)
	}
}
