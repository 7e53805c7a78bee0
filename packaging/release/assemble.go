// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpufence/gpufence/packaging/archive"
	"github.com/gpufence/gpufence/packaging/image"
)

// Repository is how the image is called, without its tag, as the chart's values have it.
const Repository = "ghcr.io/gpufence/gpufence"

const (
	docDir       = "usr/share/doc/gpufence"
	afterUpgrade = "usr/lib/gpufence/after-upgrade" // the packages' scripts run it
)

// assemble makes the files of Out, which is replaced as a whole.
func (b *builder) assemble(ctx context.Context, targets []target) error {
	next := filepath.Join(b.Work, "out")
	if err := errors.Join(os.RemoveAll(next), os.MkdirAll(next, 0o755)); err != nil {
		return fmt.Errorf("build packages: %w", err)
	}
	has := func(f string) bool { return slices.Contains(b.Formats, f) }
	images := image.Image{
		Name: Repository + ":" + b.v.Tag, Files: map[string]archive.Tree{}, Entrypoint: []string{"/usr/bin/" + agent}, Time: b.Time,
		Env: []string{"PATH=/opt/gpufence/bin:/usr/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.source": "https://github.com/gpufence/gpufence", "org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.version": b.v.Semver, "org.opencontainers.image.title": "gpufence",
		},
	}
	var tasks []func() error
	for _, t := range targets {
		tree, err := b.root(t)
		if err != nil {
			return fmt.Errorf("build packages for %s: %w", t.arch, err)
		}
		sbom := tree[docDir+"/sbom.cdx.json"].Data
		base := fmt.Sprintf("gpufence-%s-linux-%s", b.v.Package, t.arch)
		if err := os.WriteFile(filepath.Join(next, base+".cdx.json"), sbom, 0o644); err != nil {
			return fmt.Errorf("write SBOM: %w", err)
		}
		native, err := b.native(ctx, t, tree, next)
		if err != nil {
			return fmt.Errorf("build packages for %s: %w", t.arch, err)
		}
		tasks = append(tasks, native...)
		if has("tar") {
			tasks = append(tasks, func() error { return b.tarball(tree).Under(base).TarGz(filepath.Join(next, base+".tar.gz"), b.Time) })
		}
		if has("image") {
			files, sbom, err := b.imageRoot(t, tree)
			if err != nil {
				return fmt.Errorf("build image for %s: %w", t.arch, err)
			}
			images.Architectures, images.Files[t.arch] = append(images.Architectures, t.arch), files
			if err := os.WriteFile(filepath.Join(next, fmt.Sprintf("gpufence-image-%s-%s.cdx.json", b.v.Tag, t.arch)), sbom, 0o644); err != nil {
				return fmt.Errorf("write SBOM: %w", err)
			}
		}
		b.say("%s: needs glibc %s", t.arch, t.glibc)
	}
	start := time.Now()
	if has("image") {
		// The longest of them.
		tasks = append([]func() error{func() error { return images.Write(filepath.Join(next, "gpufence-image-"+b.v.Tag+".tar")) }}, tasks...)
	}
	if err := together(tasks); err != nil {
		return err
	}
	b.say("archives, %.0f s", time.Since(start).Seconds())
	if has("chart") {
		if err := b.chart(filepath.Join(next, "gpufence-"+b.v.Semver+".tgz")); err != nil {
			return err
		}
	}
	if err := b.finish(next, has("bundle")); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(b.Out), os.MkdirAll(filepath.Dir(b.Out), 0o755), os.Rename(next, b.Out)); err != nil {
		return fmt.Errorf("build packages: %w", err)
	}
	return nil
}

// together does as many tasks at a time as there are processors.
func together(tasks []func() error) error {
	failed := make([]error, len(tasks))
	slots := make(chan struct{}, runtime.NumCPU())
	var wait sync.WaitGroup
	for i, task := range tasks {
		slots <- struct{}{}
		wait.Go(func() {
			failed[i] = task()
			<-slots
		})
	}
	wait.Wait()
	return errors.Join(failed...)
}

// adder puts files into a tree until something is wrong.
type adder struct {
	tree archive.Tree
	err  error
}

func (a *adder) add(at string, e archive.Entry) {
	if a.err == nil {
		a.err = a.tree.Add(at, e)
	}
}

func (a *adder) folder(at, host string) {
	if a.err == nil {
		a.err = a.tree.AddFolder(at, host)
	}
}

// root is the file system of a package, without its configuration and completions, which formats have
// at places of their own.
func (b *builder) root(t target) (archive.Tree, error) {
	a := adder{tree: archive.Tree{}}
	for _, name := range slices.Concat(static, dynamic) {
		a.add("usr/bin/"+name, archive.Entry{Host: filepath.Join(t.bin, name), Exec: true})
	}
	// The engine is the suffix of the name that the wrapper is started by.
	for _, engine := range []string{"cri", "crio", "docker", "podman"} {
		a.add("usr/bin/gpufence-runtime."+engine, archive.Entry{Link: "gpufence-runtime"})
	}
	// Containers have the libraries of their own version mapped: those lie in a folder that no other
	// version writes into, and gpufenced resolves the links when it starts a container.
	libs := archive.Tree{}
	if err := libs.AddFolder("", t.lib); err != nil {
		return nil, err
	}
	linked := map[string]bool{}
	for at, e := range libs {
		a.add("usr/lib/gpufence/"+b.v.Build+"/"+at, archive.Entry{Host: e.Host})
		if first, _, _ := strings.Cut(at, "/"); !linked[first] {
			linked[first] = true
			a.add("usr/lib/gpufence/"+first, archive.Entry{Link: b.v.Build + "/" + first})
		}
	}
	src := func(p string) string { return filepath.Join(b.Source, p) }
	a.add(afterUpgrade, archive.Entry{Host: src("packaging/nfpm/after-upgrade"), Exec: true})
	for _, unit := range []string{"gpufenced.service", "gpufenced.socket", "gpufence-nri.service"} {
		a.add("usr/lib/systemd/system/"+unit, archive.Entry{Host: src("packaging/systemd/" + unit)})
	}
	a.add("usr/lib/sysusers.d/gpufence.conf", archive.Entry{Host: src("packaging/systemd/gpufence.sysusers")})
	a.add("usr/lib/tmpfiles.d/gpufence.conf", archive.Entry{Host: src("packaging/tmpfiles/gpufence.conf")})
	a.add("usr/share/bash-completion/completions/gpufence", archive.Entry{Host: filepath.Join(b.complete, "bash")})
	a.add("usr/share/fish/vendor_completions.d/gpufence.fish", archive.Entry{Host: filepath.Join(b.complete, "fish")})
	pages, err := os.ReadDir(b.pages)
	if err != nil {
		return nil, err
	}
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(b.pages, page.Name()))
		if err != nil {
			return nil, err
		}
		a.add("usr/share/man/man"+strings.TrimPrefix(path.Ext(page.Name()), ".")+"/"+page.Name()+".gz", archive.Entry{Data: compressed(text)})
	}
	a.folder("usr/share/gpufence/alerts", src("packaging/alerts"))
	a.folder("usr/share/gpufence/dashboards", src("packaging/dashboards"))
	if err := b.manifests(&a); err != nil {
		return nil, err
	}
	a.add("usr/share/gpufence/config.toml", archive.Entry{Host: src("packaging/config.toml")})
	chart, err := b.chartTree()
	if err != nil {
		return nil, err
	}
	for at, e := range chart {
		a.add("usr/share/gpufence/helm/"+at, e)
	}
	docs, err := filepath.Glob(src("docs/*"))
	if err != nil {
		return nil, err
	}
	for _, doc := range docs {
		a.add(docDir+"/"+filepath.Base(doc), archive.Entry{Host: doc})
	}
	for _, doc := range []string{"README.md", "SECURITY.md", "CHANGELOG.md"} {
		a.add(docDir+"/"+doc, archive.Entry{Host: src(doc)})
	}
	if err := b.terms(&a, t, t.shipped, "gpufence"); err != nil {
		return nil, err
	}
	return a.tree, a.err
}

// terms adds what is to be said about licences and contents of the programs.
func (b *builder) terms(a *adder, t target, shipped []Shipped, name string) error {
	notices, err := Notices(modulesOf(shipped))
	if err != nil {
		return err
	}
	sbom, err := SBOM(name, b.v, t.arch, b.goVersion, shipped, b.Time)
	if err != nil {
		return err
	}
	a.add(docDir+"/copyright", archive.Entry{Host: filepath.Join(b.Source, "LICENSE")})
	a.add(docDir+"/THIRD-PARTY-NOTICES.gz", archive.Entry{Data: compressed([]byte(notices))})
	a.add(docDir+"/sbom.cdx.json", archive.Entry{Data: sbom})
	return nil
}

// compressed is what gzip -9n makes.
func compressed(text []byte) []byte {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err == nil {
		_, err = z.Write(text)
		err = errors.Join(err, z.Close())
	}
	if err != nil {
		panic(err) // neither the level nor a buffer can be wrong
	}
	return out.Bytes()
}

// native lays out what deb and rpm hold, and returns what makes them of it.
func (b *builder) native(ctx context.Context, t target, tree archive.Tree, out string) ([]func() error, error) {
	root := filepath.Join(b.Work, t.arch, "root")
	if err := os.RemoveAll(root); err != nil {
		return nil, err
	}
	if err := tree.Folder(root, b.Time); err != nil {
		return nil, err
	}
	extra := archive.Tree{"config.toml": {Host: filepath.Join(b.Source, "packaging/config.toml")}, "_gpufence": {Host: filepath.Join(b.complete, "zsh")}}
	extras := filepath.Join(b.Work, t.arch, "extra")
	if err := errors.Join(os.RemoveAll(extras), os.MkdirAll(extras, 0o755)); err != nil {
		return nil, err
	}
	if err := extra.Folder(extras, b.Time); err != nil {
		return nil, err
	}
	env := []string{
		fmt.Sprintf("SOURCE_DATE_EPOCH=%d", b.Time.Unix()), "PACKAGE_VERSION=" + b.v.Package, "PACKAGE_ARCH=" + t.arch, "PACKAGE_ROOT=" + root, "PACKAGE_EXTRA=" + extras,
		"PACKAGE_GLIBC=" + t.glibc,
	}
	rpmArch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[t.arch]
	var tasks []func() error
	for format, file := range map[string]string{"deb": fmt.Sprintf("gpufence_%s_%s.deb", b.v.Package, t.arch), "rpm": fmt.Sprintf("gpufence-%s-1.%s.rpm", b.v.Package, rpmArch)} {
		if slices.Contains(b.Formats, format) {
			tasks = append(tasks, func() error {
				_, err := b.output(ctx, env, b.NFPM, "package", "--config", "packaging/nfpm/nfpm.yaml", "--packager", format, "--target", filepath.Join(out, file))
				return err
			})
		}
	}
	return tasks, nil
}

// tarball is the same for /opt/gpufence or wherever somebody wants it: usr is taken away.
func (b *builder) tarball(tree archive.Tree) archive.Tree {
	out := archive.Tree{
		"etc/gpufence/config.toml":           {Host: filepath.Join(b.Source, "packaging/config.toml")},
		"share/zsh/site-functions/_gpufence": {Host: filepath.Join(b.complete, "zsh")},
		"README.md":                          {Host: filepath.Join(b.Source, "docs/install.md")},
	}
	for at, e := range tree {
		out[strings.TrimPrefix(at, "usr/")] = e
	}
	return out
}

// imageRoot is what gpufence-agent needs to run, and what its container host puts on a node: bin, lib
// and systemd below /opt/gpufence.
func (b *builder) imageRoot(t target, tree archive.Tree) (archive.Tree, []byte, error) {
	a := adder{tree: archive.Tree{}}
	var shipped []Shipped
	for at, e := range tree {
		if rel, ok := strings.CutPrefix(at, "usr/bin/"); ok && rel != "kubectl-gpufence" {
			a.add("opt/gpufence/bin/"+rel, e)
		}
		if rel, ok := strings.CutPrefix(at, "usr/lib/gpufence/"); ok && at != afterUpgrade {
			a.add("opt/gpufence/lib/gpufence/"+rel, e)
		}
		if rel, ok := strings.CutPrefix(at, "usr/lib/systemd/system/"); ok {
			a.add("opt/gpufence/systemd/"+rel, e)
		}
	}
	for _, s := range t.shipped {
		if s.Name != "/usr/bin/kubectl-gpufence" {
			s.Name = "/opt/gpufence/" + strings.TrimPrefix(s.Name, "/usr/")
			shipped = append(shipped, s)
		}
	}
	a.folder("opt/gpufence/systemd", filepath.Join(b.Source, "packaging/image/systemd"))
	a.add("usr/bin/"+agent, archive.Entry{Host: t.agent.File, Exec: true})
	a.add("etc/passwd", archive.Entry{Data: []byte("root:x:0:0:root:/:/usr/sbin/nologin\n")})
	a.add("etc/group", archive.Entry{Data: []byte("root:x:0:\n")})
	if err := b.terms(&a, t, append(shipped, t.agent), "gpufence-image"); err != nil {
		return nil, nil, err
	}
	return a.tree, a.tree[docDir+"/sbom.cdx.json"].Data, a.err
}

var imageLine = regexp.MustCompile(`(?m)^( *image: "?)` + regexp.QuoteMeta(Repository) + `:[^"\s]+`)

// manifests are the chart as it renders, with the image of this version.
func (b *builder) manifests(a *adder) error {
	folder := filepath.Join(b.Source, "packaging/kubernetes")
	a.folder("usr/share/gpufence/kubernetes", folder)
	text, err := os.ReadFile(filepath.Join(folder, "gpufence.yaml"))
	if err != nil {
		return fmt.Errorf("package manifests: %w", err)
	}
	images := imageLine.FindAll(text, -1)
	if len(images) == 0 {
		return fmt.Errorf("package manifests: gpufence.yaml names no image %s", Repository)
	}
	if a.err == nil {
		a.tree["usr/share/gpufence/kubernetes/gpufence.yaml"] = archive.Entry{Data: imageLine.ReplaceAll(text, []byte("${1}"+Repository+":"+b.v.Tag))}
	}
	return nil
}

var chartVersions = regexp.MustCompile(`(?m)^(version|appVersion): .*$`)

// chartTree is the chart with this version, whose image is the one of this version.
func (b *builder) chartTree() (archive.Tree, error) {
	tree := archive.Tree{}
	dir := filepath.Join(b.Source, "packaging/helm/gpufence")
	if err := tree.AddFolder("gpufence", dir); err != nil {
		return nil, fmt.Errorf("package chart: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "Chart.yaml"))
	if err != nil {
		return nil, fmt.Errorf("package chart: %w", err)
	}
	set := 0
	edited := chartVersions.ReplaceAllStringFunc(string(text), func(line string) string {
		set++
		if strings.HasPrefix(line, "version") {
			return fmt.Sprintf("version: %q", b.v.Semver)
		}
		return fmt.Sprintf("appVersion: %q", b.v.Tag)
	})
	if set != 2 {
		return nil, fmt.Errorf("package chart: Chart.yaml has %d lines version and appVersion, want 2", set)
	}
	tree["gpufence/Chart.yaml"] = archive.Entry{Data: []byte(edited)}
	return tree, nil
}

func (b *builder) chart(file string) error {
	tree, err := b.chartTree()
	if err != nil {
		return err
	}
	return tree.TarGz(file, b.Time)
}

// finish adds checksums, and the bundle of everything.
func (b *builder) finish(dir string, bundle bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("write checksums: %w", err)
	}
	var sums strings.Builder
	tree := archive.Tree{}
	for _, e := range entries {
		file := filepath.Join(dir, e.Name())
		sum, err := sumOf(file)
		if err != nil {
			return fmt.Errorf("write checksums: %w", err)
		}
		fmt.Fprintf(&sums, "%s  %s\n", sum, e.Name())
		tree[e.Name()] = archive.Entry{Host: file}
	}
	if bundle {
		tree["SHA256SUMS"] = archive.Entry{Data: []byte(sums.String())}
		tree["install.md"] = archive.Entry{Host: filepath.Join(b.Source, "docs/install.md")}
		name := "gpufence-" + b.v.Package + "-offline"
		file := filepath.Join(dir, name+".tar")
		if err := tree.Under(name).TarFile(file, b.Time); err != nil {
			return err
		}
		sum, err := sumOf(file)
		if err != nil {
			return fmt.Errorf("write checksums: %w", err)
		}
		fmt.Fprintf(&sums, "%s  %s\n", sum, name+".tar")
	}
	if err := os.WriteFile(filepath.Join(dir, "SHA256SUMS"), []byte(sums.String()), 0o644); err != nil {
		return fmt.Errorf("write checksums: %w", err)
	}
	return nil
}

func sumOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	_, err = io.Copy(sum, f)
	return fmt.Sprintf("%x", sum.Sum(nil)), errors.Join(err, f.Close())
}
