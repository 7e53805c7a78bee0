// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/tests/node"
)

const mib = uint64(1) << 20

// viewed is what tests/e2e/client/views.c answers.
type viewed map[string]any

func (v viewed) bytes(name string) uint64 {
	n, ok := v[name].(json.Number)
	if !ok {
		return 0
	}
	i, err := n.Int64()
	if err != nil || i < 0 {
		return 0
	}
	return uint64(i)
}

func (v viewed) text(name string) string {
	s, _ := v[name].(string)
	return s
}

// inside is a process in a container that answers lines.
type inside struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  chan string
	stderr bytes.Buffer
}

func (p *inside) ask(line string) viewed {
	p.t.Helper()
	if _, err := io.WriteString(p.stdin, line+"\n"); err != nil {
		p.t.Fatalf("%s: %v: %s", line, err, p.stderr.String())
	}
	select {
	case text, ok := <-p.lines:
		if !ok {
			p.t.Fatalf("%s: it has ended: %s", line, p.stderr.String())
		}
		v := viewed{}
		d := json.NewDecoder(strings.NewReader(text))
		d.UseNumber()
		if err := d.Decode(&v); err != nil || v["ok"] != true {
			p.t.Fatalf("%s: %s, %v", line, text, err)
		}
		return v
	case <-time.After(node.Patience):
		p.t.Fatalf("%s: it does not answer", line)
	}
	return nil
}

// pods is a node whose containers run under runc through the wrapper.
type pods struct {
	*node.Node
	t       *testing.T
	root    string // image
	hostPID bool   // containers have the host's process numbers
}

func newPods(t *testing.T, opts node.Options) *pods {
	t.Helper()
	opts.Dist = dist(t)
	n, err := node.New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	p := &pods{Node: n, t: t, root: n.Path("image")}
	for _, dir := range []string{n.Path("cdi"), n.Path("runc"), n.Path("bundles"), p.root} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	libraries := n.Dist("simgpu")
	p.command("write the CDI specification", n.Dist("bin/simgpu"), "--dir", n.Path("sim"), "cdi", "--lib-dir", libraries, "--out", n.Path("cdi", "simgpu.json"))
	// The program, and what it and the driver need of the host's C library.
	program := n.Dist("clients/views")
	files := map[string]string{"/views": program}
	needed := p.command("list libraries", "ldd", program, filepath.Join(libraries, "libcuda.so.1"), filepath.Join(libraries, "libnvidia-ml.so.1"))
	for _, m := range regexp.MustCompile(`(?m)(/\S+) \(0x`).FindAllStringSubmatch(needed, -1) {
		files[m[1]] = m[1]
	}
	for to, from := range files {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(p.root, to)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, b, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p *pods) command(what, program string, args ...string) string {
	p.t.Helper()
	out, err := exec.CommandContext(p.t.Context(), program, args...).Output()
	if err != nil {
		p.t.Fatalf("%s: %v: %s", what, err, out)
	}
	return string(out)
}

// begin starts a process whose lines are read, through the wrapper.
func (p *pods) begin(args ...string) *inside {
	p.t.Helper()
	in := &inside{t: p.t, lines: make(chan string, 64)}
	in.cmd = exec.CommandContext(p.t.Context(), p.Dist("bin/gpufence-runtime"), append([]string{"--root", p.Path("runc")}, args...)...)
	in.cmd.Env = append(os.Environ(), "GPUFENCE_CONFIG="+p.ConfigPath())
	in.cmd.Stderr = &in.stderr
	in.cmd.WaitDelay = node.Patience
	var err error
	if in.stdin, err = in.cmd.StdinPipe(); err != nil {
		p.t.Fatal(err)
	}
	stdout, err := in.cmd.StdoutPipe()
	if err != nil {
		p.t.Fatal(err)
	}
	if err := in.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	go func() {
		defer close(in.lines)
		for s := bufio.NewScanner(stdout); s.Scan(); {
			in.lines <- s.Text()
		}
	}()
	return in
}

// run starts a container with a GPU, and in it the program.
func (p *pods) run(id, gpu, limit string) *inside {
	p.t.Helper()
	return p.runWith(id, limit, func(spec *specs.Spec) {
		spec.Process.Env = append(spec.Process.Env, "NVIDIA_VISIBLE_DEVICES="+gpu, "CUDA_VISIBLE_DEVICES="+gpu)
	})
}

// runWith starts a container that an engine has given its GPUs already.
func (p *pods) runWith(id, limit string, give func(*specs.Spec)) *inside {
	p.t.Helper()
	dir := p.Path("bundles", id)
	caps := []string{"CAP_KILL"}
	spec := specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: []string{"/views"}, Cwd: "/", NoNewPrivileges: true,
			Env:          []string{"PATH=/usr/bin:/bin"},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Root:        &specs.Root{Path: "rootfs"},
		Annotations: map[string]string{"gpufence.dev/memory.max": limit},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: "/" + filepath.Base(p.Dir) + "-" + id,
			Resources:   &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace}},
		},
	}
	if p.hostPID {
		spec.Linux.Namespaces = spec.Linux.Namespaces[1:]
	}
	give(&spec)
	text, err := json.Marshal(spec)
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)
	}
	if err != nil {
		p.t.Fatal(err)
	}
	p.command("copy the image", "cp", "-a", p.root, filepath.Join(dir, "rootfs"))
	for _, d := range []string{"proc", "dev", "etc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(dir, "rootfs", d), 0o755); err != nil {
			p.t.Fatal(err)
		}
	}
	in := p.begin("--log", filepath.Join(dir, "log.json"), "--log-format", "json", "run", "--bundle", dir, id)
	p.t.Cleanup(func() {
		out, err := exec.CommandContext(context.WithoutCancel(p.t.Context()), p.Dist("bin/gpufence-runtime"), "--root", p.Path("runc"), "delete", "--force", id).CombinedOutput()
		if err != nil {
			p.t.Errorf("delete the container: %v: %s", err, out)
		}
		_ = in.cmd.Wait() // it was killed
	})
	return in
}

// enter starts the program once more in a container, listed by NVML as what kind says.
func (p *pods) enter(id, kind string) *inside {
	p.t.Helper()
	in := p.begin("exec", "--env", "SIMGPU_LIST="+kind, id, "/views")
	p.t.Cleanup(func() { _ = in.cmd.Process.Kill() }) // with its container, if not by itself
	return in
}

// inspect is what `gpufence inspect` says of the container's only GPU.
func (p *pods) inspect(id string) api.ContainerGPU {
	p.t.Helper()
	var c api.Container
	out := p.command("inspect", p.Dist("bin/gpufence"), "--socket", p.Socket, "inspect", id, "-o", "json")
	if err := json.Unmarshal([]byte(out), &c); err != nil || len(c.GPUs) != 1 {
		p.t.Fatalf("inspect says %s: %v", out, err)
	}
	return c.GPUs[0]
}

var versions = []string{"", "_v2", "_v3", "_detail"}

// agree says in what one process's views differ from one another and from what is charged.
func agree(v viewed, limit, used uint64) error {
	want := map[string]uint64{"total_bytes": limit, "device_bytes": limit, "free_bytes": limit - used}
	handles := []string{"nvml"}
	if strings.HasPrefix(v.text("uuid"), "MIG-") {
		handles = append(handles, "by_index")
	}
	for _, h := range handles {
		for _, version := range []string{"", "_v2"} {
			want[h+"_total"+version], want[h+"_free"+version], want[h+"_used"+version] = limit, limit-used, used
		}
		want[h+"_reserved_v2"] = 0
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if _, ok := v[name]; !ok || v.bytes(name) != want[name] {
			return fmt.Errorf("%s is %v, want %d", name, v[name], want[name])
		}
	}
	return nil
}

// compare says in what the views of a container's processes, its files and inspect differ. It charges at
// least so much. reader reads the files.
func (p *pods) compare(id, uuid string, limit, least uint64, reader *inside, all []*inside) error {
	g := p.inspect(id)
	if g.UUID != uuid || g.Limits.Max != limit || g.Current < least {
		return fmt.Errorf("inspect says %+v", g)
	}
	for name, want := range map[string]uint64{"memory.max": limit, "memory.current": g.Current} {
		if text := reader.ask("read /dev/gpufence/" + name).text("text"); text != fmt.Sprintf("%s %d\n", uuid, want) {
			return fmt.Errorf("%s is %q, want %d", name, text, want)
		}
	}
	for i, in := range all {
		v := in.ask("views")
		if v.text("uuid") != uuid {
			return fmt.Errorf("the GPU is %s, not %s", v.text("uuid"), uuid)
		}
		if err := agree(v, limit, g.Current); err != nil {
			return fmt.Errorf("process %d: %w", i, err)
		}
	}
	return nil
}

// TestViews: what the processes of a container are shown of their GPU, or of their MIG instance, is the
// same by every way, from every process, in its files and by `gpufence inspect`; and NVML's lists, of each
// kind and version, have the container's processes and nobody else's.
func TestViews(t *testing.T) {
	if _, err := exec.LookPath("runc"); err != nil {
		t.Fatal(err)
	}
	// The demo makes this process the one that reaps; here nobody would, and an ended container's cgroup would stay.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, mig, delivery string
		hostPID             bool
	}{
		{"GPU", "0", "preload", false}, {"instance", "3", "preload", false},
		{"GPU by stubs", "0", "stub", false}, {"instance by stubs", "3", "stub", false},
		{"with the host's process numbers", "0", "preload", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newPods(t, node.Options{
				Sim:    []string{"--gpus", "1", "--model", "h100", "--memory", "16GiB", "--context-bytes", "16MiB", "--mig", test.mig, "--pid-view", "caller"},
				Config: []string{fmt.Sprintf("shim-delivery = %q", test.delivery)},
			})
			p.hostPID = test.hostPID
			gpus, err := p.Client.GPUs(t.Context())
			if err != nil || len(gpus) == 0 {
				t.Fatalf("GPUs %v, %v", gpus, err)
			}
			uuid := gpus[len(gpus)-1].UUID
			if mig := strings.HasPrefix(uuid, "MIG-"); mig != (test.mig != "0") {
				t.Fatalf("the GPU is %s", uuid)
			}
			// Somebody else on the same GPU, whom nobody here is to see.
			other := p.run("other", uuid, "1Gi")
			other.ask("context")
			other.ask("alloc 100")

			const limit = 4096 * mib
			first := p.run("viewed", uuid, "4Gi")
			first.ask("read /dev/gpufence/memory.max") // it runs
			all := []struct {
				kind string
				in   *inside
			}{{"Compute", first}, {"Graphics", p.enter("viewed", "graphics")}, {"MPSCompute", p.enter("viewed", "mps")}}
			pids := map[string]string{}
			for i, one := range all {
				one.in.ask("context")
				one.in.ask(fmt.Sprintf("alloc %d", 64<<i))
				pids[one.kind] = fmt.Sprint(one.in.ask("views")["pid"])
			}
			if (pids["Compute"] == "1") == test.hostPID || pids["Graphics"] == pids["MPSCompute"] {
				t.Fatalf("the processes are %v", pids)
			}

			var differ error
			err = node.Until(t.Context(), "all views agree", func() (bool, error) {
				differ = p.compare("viewed", uuid, limit, (64+128+256)*mib, first, []*inside{all[0].in, all[1].in, all[2].in})
				return differ == nil, nil
			})
			if err != nil {
				t.Errorf("%v: %v", err, differ)
			}
			for _, one := range all {
				v := one.in.ask("views")
				for kind, pid := range pids {
					for _, version := range versions {
						if got := v.text(kind + version); got != pid {
							t.Errorf("a process listed under %s sees %q under %s%s, want %s", one.kind, got, kind, version, pid)
						}
					}
				}
			}
			for _, one := range all {
				got := strings.Fields(one.in.ask("views").text("All_detail"))
				if want := slices.Sorted(maps.Values(pids)); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
					t.Errorf("a process listed under %s sees %v under all modes, want %v", one.kind, got, want)
				}
			}
			// The neighbour sees itself alone.
			v := other.ask("views")
			if got := v.text("All_detail"); got != fmt.Sprint(v["pid"]) {
				t.Errorf("the neighbour sees %q under all modes", got)
			}
			for _, version := range versions {
				if v.text("Compute"+version) != fmt.Sprint(v["pid"]) || v.text("Graphics"+version) != "" || v.text("MPSCompute"+version) != "" {
					t.Errorf("the neighbour sees %v", v)
				}
			}
		})
	}
}
