// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/rogpeppe/go-internal/testscript"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/gpufence/gpufence/tests/simgpu/simtest"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"simgpu": func() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) },
		"holder": func() { os.Exit(hold()) },
	})
}

// hold allocates 64 MiB on gpu0, frees them, and ends: a process with a short history.
func hold() int {
	conn, err := net.Dial("unixpacket", filepath.Join(os.Getenv(wire.DirEnv), "gpu0"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	ask := func(op wire.Op, args ...uint64) uint64 {
		r := wire.Req{Op: op}
		copy(r.Arg[:], args)
		buf := make([]byte, wire.PacketMax)
		if _, err := conn.Write(r.Encode()); err != nil {
			return 0
		}
		n, err := conn.Read(buf)
		if err != nil {
			return 0
		}
		rep, _, err := wire.DecodeRep(buf[:n])
		if err != nil {
			return 0
		}
		return rep.Val[0]
	}
	handle := ask(wire.OpAlloc, 0, 64<<20)
	if handle == 0 || ask(wire.OpFree, handle) != 64<<20 {
		fmt.Fprintln(os.Stderr, "holder: was refused")
		return 1
	}
	fmt.Println(os.Getpid())
	return 0
}

func TestScripts(t *testing.T) {
	t.Parallel()
	bin := filepath.Dir(simtest.Dist(t, "bin/simgpud"))
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			// Short: a socket's path has 108 bytes.
			dir, err := os.MkdirTemp("", "simgpu-")
			if err != nil {
				return err
			}
			env.Defer(func() { _ = os.RemoveAll(dir) })
			env.Setenv(wire.DirEnv, dir)
			env.Setenv("PATH", env.Getenv("PATH")+":"+bin)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// history-of-last: shows the history of the pid that the last command printed.
			"history-of-last": func(ts *testscript.TestScript, _ bool, _ []string) {
				var pid int
				if _, err := fmt.Sscan(ts.ReadFile("stdout"), &pid); err != nil {
					ts.Fatalf("read pid: %v", err)
				}
				ts.Check(ts.Exec("simgpu", "history", "-o", "json", "--pid", fmt.Sprint(pid)))
			},
		},
	})
}

// The numbers of a MIG instance's nodes are the same in the driver's folder and in the specification.
func TestCapabilities(t *testing.T) {
	t.Parallel()
	dir, s := simtest.Start(t, "--gpus", "2", "--mig", "0,2")
	out := filepath.Join(t.TempDir(), "capabilities")
	if code := run(t.Context(), []string{"--dir", dir, "capabilities", "--out", out}, io.Discard, io.Discard); code != 0 {
		t.Fatalf("exit %d", code)
	}
	var files []string
	if err := filepath.WalkDir(out, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(out, path)
		first, _, _ := strings.Cut(string(text), "\n")
		files = append(files, name+" "+first)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	want := []string{
		"gpu1/mig/gi1/access DeviceFileMinor: 147", "gpu1/mig/gi1/ci0/access DeviceFileMinor: 148",
		"gpu1/mig/gi2/access DeviceFileMinor: 156", "gpu1/mig/gi2/ci0/access DeviceFileMinor: 157",
		"mig/config DeviceFileMinor: 1", "mig/monitor DeviceFileMinor: 2",
	}
	if !slices.Equal(files, want) {
		t.Errorf("got %q", files)
	}
	var nodes []string
	for _, g := range s.State().GPUs {
		if g.Instances > 0 {
			continue
		}
		for _, n := range nvidiaNodes(g) {
			nodes = append(nodes, fmt.Sprint(n.Path, " ", n.Major, ":", n.Minor))
		}
	}
	if want := []string{
		"/dev/nvidia0 195:0",
		"/dev/nvidia1 195:1", "/dev/nvidia-caps/nvidia-cap147 237:147", "/dev/nvidia-caps/nvidia-cap148 237:148",
		"/dev/nvidia1 195:1", "/dev/nvidia-caps/nvidia-cap156 237:156", "/dev/nvidia-caps/nvidia-cap157 237:157",
	}; !slices.Equal(nodes, want) {
		t.Errorf("got %q", nodes)
	}
}

// The specification does, with the library that engines use, what a container needs.
func TestCDI(t *testing.T) {
	t.Parallel()
	dir, s := simtest.Start(t, "--gpus", "3", "--mig", "0,0,2")
	libs := t.TempDir()
	for _, lib := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := os.WriteFile(filepath.Join(libs, lib), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	spec, err := cdiSpec(s.State(), dir, libs, false)
	if err != nil {
		t.Fatal(err)
	}
	specs1 := t.TempDir()
	if err := writeCDI(filepath.Join(specs1, "simgpu.json"), spec); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(filepath.Join(specs1, ".simgpu-*")); err != nil || len(left) != 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(specs1), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	uuid := s.State().GPUs[1].UUID
	for device, want := range map[string][]string{"1": {"gpu1"}, uuid: {"gpu1"}, "2:1": {"gpu2.mig1"}, s.State().GPUs[3].UUID: {"gpu2.mig0"},
		"all": {"gpu0", "gpu1", "gpu2.mig0", "gpu2.mig1"}} {
		var oci specs.Spec
		if _, err := cache.InjectDevices(&oci, "gpufence.dev/simgpu="+device); err != nil {
			t.Errorf("%s: %v", device, err)
			continue
		}
		got := map[string]string{}
		for _, m := range oci.Mounts {
			got[m.Destination] = m.Source
		}
		expect := map[string]string{"/dev/simgpu/ctl": filepath.Join(dir, "ctl")}
		for _, lib := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			for _, at := range containerLibs {
				expect[filepath.Join(at, lib)] = filepath.Join(libs, lib)
			}
		}
		for _, gpu := range want {
			expect["/dev/simgpu/"+gpu] = filepath.Join(dir, gpu)
		}
		if len(got) != len(expect) {
			t.Errorf("%s: mounts %v", device, got)
		}
		for at, source := range expect {
			if got[at] != source {
				t.Errorf("%s: %s is from %q, want %q", device, at, got[at], source)
			}
		}
	}
	if _, err := cdiSpec(s.State(), dir, t.TempDir(), false); err == nil {
		t.Error("a specification without libraries was written")
	}
}
