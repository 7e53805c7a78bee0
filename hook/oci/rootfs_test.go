// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/plan"
)

// compile builds a program with the C compiler, as images contain them.
func compile(t *testing.T, out string, flags ...string) string {
	t.Helper()
	src := writeFile(t, filepath.Join(t.TempDir(), "main.c"), "int main(void) { return 0; }\n")
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "cc", append([]string{"-o", out, src}, flags...)...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cc %v: %v\n%s", flags, err, text)
	}
	return out
}

func link(t *testing.T, target, name string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, name); err != nil {
		t.Fatal(err)
	}
}

func TestLoader(t *testing.T) {
	root, volume := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	compile(t, at("usr/bin/app"))
	compile(t, at("usr/bin/static"), "-static")
	compile(t, at("usr/bin/static-pie"), "-static-pie")
	compile(t, at("usr/bin/alpine"), "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")
	compile(t, at("usr/bin/android"), "-Wl,--dynamic-linker=/system/bin/linker64")
	compile(t, filepath.Join(volume, "tool"), "-static")
	compile(t, at("mnt/tool"))
	link(t, "usr/bin", at("bin"))
	link(t, "/usr/bin/app", at("opt/absolute"))
	link(t, "../../../../../../usr/bin/static", at("opt/outward"))
	link(t, "/proc/self/exe", at("opt/magic"))
	link(t, "loop", at("opt/loop"))
	program(t, at("opt/script"))
	if err := os.WriteFile(at("opt/script"), []byte("#! /usr/bin/alpine -x\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"env-script": "#!/usr/bin/app python3\n", "nested": "#!/opt/script\n", "lost": "#!/none\n", "relative": "#!app\n", "bare": "#!", "text": "echo\n", "empty": "",
	} {
		if err := os.WriteFile(at("opt/"+name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, at("first/app"), "not executable")
	if err := os.MkdirAll(at("second/app"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(at("opt/fifo"), 0o755); err != nil {
		t.Fatal(err)
	}
	mounts := []plan.Mount{
		{Destination: "/mnt", Source: volume, Type: "bind"},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs"},
		{Destination: "/sbin/docker-init", Source: filepath.Join(volume, "tool"), Options: []string{"rbind"}},
	}
	tests := []struct {
		name string
		args []string
		env  []string
		cwd  string
		want plan.Loader
	}{
		{"glibc", []string{"/usr/bin/app"}, nil, "", plan.LoaderGlibc},
		{"static", []string{"/usr/bin/static"}, nil, "", plan.LoaderStatic},
		{"static-pie", []string{"/usr/bin/static-pie"}, nil, "", plan.LoaderStatic},
		{"musl", []string{"/usr/bin/alpine"}, nil, "", plan.LoaderMusl},
		{"other libc", []string{"/usr/bin/android"}, nil, "", plan.LoaderUnknown},
		{"link in the image", []string{"/bin/app"}, nil, "", plan.LoaderGlibc},
		{"absolute link stays in the image", []string{"/opt/absolute"}, nil, "", plan.LoaderGlibc},
		{"link out of the image stays inside", []string{"/opt/outward"}, nil, "", plan.LoaderStatic},
		{"magic link", []string{"/opt/magic"}, nil, "", plan.LoaderUnknown},
		{"loop", []string{"/opt/loop"}, nil, "", plan.LoaderUnknown},
		{"script", []string{"/opt/script"}, nil, "", plan.LoaderMusl},
		{"script by env", []string{"/opt/env-script"}, nil, "", plan.LoaderGlibc},
		{"script of a script", []string{"/opt/nested"}, nil, "", plan.LoaderUnknown},
		{"script without interpreter", []string{"/opt/lost"}, nil, "", plan.LoaderUnknown},
		{"script with a relative interpreter", []string{"/opt/relative"}, nil, "", plan.LoaderUnknown},
		{"bare", []string{"/opt/bare"}, nil, "", plan.LoaderUnknown},
		{"text", []string{"/opt/text"}, nil, "", plan.LoaderUnknown},
		{"empty file", []string{"/opt/empty"}, nil, "", plan.LoaderUnknown},
		{"fifo", []string{"/opt/fifo"}, nil, "", plan.LoaderUnknown},
		{"missing", []string{"/none"}, nil, "", plan.LoaderUnknown},
		{"no args", nil, nil, "", plan.LoaderUnknown},
		{"empty arg", []string{""}, nil, "", plan.LoaderUnknown},
		{"PATH", []string{"app"}, []string{"PATH=/first:/second:/usr/bin"}, "", plan.LoaderGlibc},
		{"last PATH", []string{"app"}, []string{"PATH=/usr/bin", "PATH=/none"}, "", plan.LoaderUnknown},
		{"no PATH", []string{"static"}, nil, "", plan.LoaderStatic},
		{"empty element of PATH", []string{"static"}, []string{"PATH=:/x"}, "/usr/bin", plan.LoaderStatic},
		{"relative to cwd", []string{"./static"}, nil, "/usr/bin", plan.LoaderStatic},
		{"relative above the root", []string{"../../../usr/bin/static"}, nil, "/usr", plan.LoaderStatic},
		{"in a volume", []string{"/mnt/tool"}, nil, "", plan.LoaderStatic},
		{"in a tmpfs", []string{"/tmp/app"}, nil, "", plan.LoaderUnknown},
		{"tmpfs in PATH", []string{"app"}, []string{"PATH=/tmp:/usr/bin"}, "", plan.LoaderUnknown},
		{"engine's init", []string{"/sbin/docker-init", "--", "app"}, nil, "", plan.LoaderGlibc},
		{"engine's init alone", []string{"/sbin/docker-init"}, nil, "", plan.LoaderStatic},
		{"init with options", []string{"/usr/bin/tini", "-g", "/usr/bin/alpine", "x"}, nil, "", plan.LoaderMusl},
		{"init with nothing", []string{"/sbin/docker-init", "--"}, nil, "", plan.LoaderStatic},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			im := image{root: root, mounts: mounts}
			if got := im.loader(test.args, test.env, test.cwd); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestPlaceTakesTheLastMount(t *testing.T) {
	im := image{root: "/root", mounts: []plan.Mount{
		{Destination: "/a", Source: "/A", Type: "bind"},
		{Destination: "/a/b/", Source: "/B", Type: "bind"},
		{Destination: "/a/b/c", Source: "tmpfs", Type: "tmpfs"},
		{Destination: "/h/i", Source: "/hidden", Type: "bind"},
		{Destination: "/h", Source: "/H", Type: "bind"},
		{Destination: "/f", Source: "/F", Type: "bind"},
		{Destination: "/f", Source: "/F2", Type: "bind"},
		{Destination: "/", Source: "/whole", Type: "bind"},
	}}
	tests := []struct{ name, root, rel string }{
		{"/x", "/root", "/x"},
		{"/ab", "/root", "/ab"},
		{"/a/b/x", "/B", "/x"},
		{"/a/b", "/B", ""},
		{"/h/i/x", "/H", "/i/x"},
		{"/f", "/F2", ""},
		{"/a/../x", "/root", "/x"},
	}
	for _, test := range tests {
		root, rel, err := im.place(test.name)
		if err != nil || root != test.root || rel != test.rel {
			t.Errorf("%s: %q %q %v", test.name, root, rel, err)
		}
	}
	if _, _, err := im.place("/a/b/c/d"); !errors.Is(err, errUnknownPlace) {
		t.Errorf("got %v", err)
	}
}

func TestPreload(t *testing.T) {
	big := strings.Repeat("#\n", maxPreload/2)
	tests := []struct {
		name  string
		build func(t *testing.T, root string) []plan.Mount
		want  string
		code  quota.Code
	}{
		{"none", func(*testing.T, string) []plan.Mount { return nil }, "", ""},
		{"lines", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", "/usr/lib/libjemalloc.so\n")
			return nil
		}, "/usr/lib/libjemalloc.so\n", ""},
		{"largest", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", big)
			return nil
		}, big, ""},
		{"too large", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", big+"x")
			return nil
		}, "", quota.CodePreloadFile},
		{"absolute link stays in the image", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/opt/p", "/opt/x.so")
			link(t, "/opt/p", root+"/etc/ld.so.preload")
			return nil
		}, "/opt/x.so", ""},
		{"link to a file of the host", func(t *testing.T, root string) []plan.Mount {
			link(t, "../../../../../../../../etc/passwd", root+"/etc/ld.so.preload")
			return nil
		}, "", ""},
		{"linked /etc", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/real/ld.so.preload", "a")
			link(t, "/real", root+"/etc")
			return nil
		}, "a", ""},
		{"magic link", func(t *testing.T, root string) []plan.Mount {
			link(t, "/proc/self/environ", root+"/etc/ld.so.preload")
			return nil
		}, "", ""},
		{"loop", func(t *testing.T, root string) []plan.Mount {
			link(t, "ld.so.preload", root+"/etc/ld.so.preload")
			return nil
		}, "", quota.CodePreloadFile},
		{"directory", func(t *testing.T, root string) []plan.Mount {
			if err := os.MkdirAll(root+"/etc/ld.so.preload", 0o755); err != nil {
				t.Fatal(err)
			}
			return nil
		}, "", quota.CodePreloadFile},
		{"fifo", func(t *testing.T, root string) []plan.Mount {
			if err := os.MkdirAll(root+"/etc", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(root+"/etc/ld.so.preload", 0o644); err != nil {
				t.Fatal(err)
			}
			return nil
		}, "", quota.CodePreloadFile},
		{"/etc is a file", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc", "")
			return nil
		}, "", ""},
		{"HAMi in the image", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", "/usr/local/vgpu/libvgpu.so\n")
			return nil
		}, "", quota.CodeForeignPreload},
		{"HAMi by a mount", func(t *testing.T, root string) []plan.Mount {
			f := writeFile(t, t.TempDir()+"/p", "/usr/local/vgpu/libvgpu.so\n")
			return []plan.Mount{{Destination: preloadPath, Source: f, Type: "bind"}}
		}, "", quota.CodeForeignPreload},
		{"the user's mount over the image's", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", "image")
			f := writeFile(t, t.TempDir()+"/p", "user")
			return []plan.Mount{{Destination: "/etc//ld.so.preload", Source: f, Options: []string{"bind"}}}
		}, "user", ""},
		{"ours over the image's", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", "image")
			return []plan.Mount{{Destination: preloadPath, Source: "/run/gpufence/pods/x/preload", Type: "bind"}}
		}, "image", ""},
		{"on a tmpfs", func(t *testing.T, root string) []plan.Mount {
			writeFile(t, root+"/etc/ld.so.preload", "image")
			return []plan.Mount{{Destination: "/etc", Source: "tmpfs", Type: "tmpfs"}}
		}, "", ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			root := t.TempDir()
			im := image{root: root, mounts: test.build(t, root)}
			got, err := im.preload("/run/gpufence")
			if test.code == "" && err != nil || test.code != "" && !errors.Is(err, test.code) {
				t.Fatalf("got %v, want %q", err, test.code)
			}
			if got != test.want {
				t.Errorf("got %.60q, want %.60q", got, test.want)
			}
		})
	}
	if got, err := (image{root: filepath.Join(t.TempDir(), "none")}).preload(""); got != "" || err != nil {
		t.Errorf("a root that does not exist is the runtime's to report: %q %v", got, err)
	}
}

func TestCheckForeign(t *testing.T) {
	tests := []struct {
		env    []string
		mounts []plan.Mount
		bad    bool
	}{
		{nil, nil, false},
		{[]string{"LD_PRELOAD=/usr/lib/libjemalloc.so"}, []plan.Mount{{Destination: "/usr/lib/libgpu.so"}}, false},
		{[]string{"X=libvgpu.so"}, nil, false},
		{[]string{"LD_PRELOAD=/a.so:/usr/local/vgpu/libvgpu.so"}, nil, true},
		{nil, []plan.Mount{{Destination: "/usr/local/vgpu/libvgpu.so"}}, true},
		{nil, []plan.Mount{{Destination: "/usr/local/vgpu/libvgpu.so.2.4/"}}, true},
	}
	for _, test := range tests {
		err := checkForeign(test.env, test.mounts)
		if test.bad != errors.Is(err, quota.CodeForeignPreload) || !test.bad && err != nil {
			t.Errorf("%v %v: %v", test.env, test.mounts, err)
		}
	}
}

// elf makes the least of an ELF file: a header and program headers.
func elf(wide bool, order binary.AppendByteOrder, interpreter string) []byte {
	class, data := byte(1), byte(1)
	if wide {
		class = 2
	}
	if order == binary.AppendByteOrder(binary.BigEndian) {
		data = 2
	}
	b := append([]byte("\x7fELF"), class, data, 1)
	b = append(b, make([]byte, 16-len(b))...)
	b = order.AppendUint16(b, 2)
	b = order.AppendUint16(b, 62)
	b = order.AppendUint32(b, 1)
	word := func(b []byte, v uint64) []byte {
		if wide {
			return order.AppendUint64(b, v)
		}
		return order.AppendUint32(b, uint32(v))
	}
	header, entry := uint64(52), uint16(32)
	if wide {
		header, entry = 64, 56
	}
	b = word(b, 0)      // entry point
	b = word(b, header) // program headers
	b = word(b, 0)      // section headers
	b = order.AppendUint32(b, 0)
	b = order.AppendUint16(b, uint16(header))
	b = order.AppendUint16(b, entry)
	b = order.AppendUint16(b, 2)
	b = append(b, make([]byte, int(header)-len(b))...)
	for _, kind := range []uint32{1, 3} {
		start := len(b)
		b = order.AppendUint32(b, kind)
		if wide {
			b = order.AppendUint32(b, 4)
		}
		b = word(b, header+2*uint64(entry))
		b = word(b, 0)
		b = word(b, 0)
		b = word(b, uint64(len(interpreter)+1))
		b = append(b, make([]byte, int(entry)-(len(b)-start))...)
	}
	return append(append(b, interpreter...), 0)
}

func TestELFInterpreter(t *testing.T) {
	for _, wide := range []bool{true, false} {
		for _, order := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
			t.Run(fmt.Sprint(wide, order), func(t *testing.T) {
				whole := elf(wide, order, "/lib/ld-linux.so.2")
				got, err := elfInterpreter(bytes.NewReader(whole))
				if err != nil || got != "/lib/ld-linux.so.2" {
					t.Fatalf("got %q, %v", got, err)
				}
				for n := range len(whole) {
					if got, err := elfInterpreter(bytes.NewReader(whole[:n])); err == nil {
						t.Fatalf("%d of %d bytes: %q", n, len(whole), got)
					}
				}
			})
		}
	}
	if _, err := elfInterpreter(bytes.NewReader(elf(true, binary.LittleEndian, strings.Repeat("x", maxInterpreter)))); err == nil {
		t.Error("accepts an interpreter longer than a path")
	}
}

func TestLoaderOf(t *testing.T) {
	tests := map[string]plan.Loader{
		"":                                      plan.LoaderStatic,
		"/lib64/ld-linux-x86-64.so.2":           plan.LoaderGlibc,
		"/lib/ld-linux-aarch64.so.1":            plan.LoaderGlibc,
		"/lib/ld-linux.so.2":                    plan.LoaderGlibc,
		"/lib64/ld64.so.2":                      plan.LoaderGlibc,
		"/nix/store/x/lib/ld-linux-x86-64.so.2": plan.LoaderGlibc,
		"/lib/ld-musl-aarch64.so.1":             plan.LoaderMusl,
		"/lib/ld-uClibc.so.0":                   plan.LoaderUnknown,
		"relative":                              plan.LoaderUnknown,
	}
	for name, want := range tests {
		if got := loaderOf(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func FuzzELFInterpreter(f *testing.F) {
	f.Add(elf(true, binary.LittleEndian, "/lib64/ld-linux-x86-64.so.2"))
	f.Add(elf(false, binary.BigEndian, "/lib/ld.so.1"))
	f.Add([]byte("\x7fELF"))
	f.Add([]byte("#!/bin/sh\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		name, err := elfInterpreter(bytes.NewReader(text))
		if err != nil && name != "" || len(name) > maxInterpreter {
			t.Fatalf("%q, %v", name, err)
		}
		if in, ok := shebang(text); ok && in[0] != '/' {
			t.Fatalf("relative interpreter %q", in)
		}
	})
}

func TestNarrowLib(t *testing.T) {
	root := t.TempDir()
	im := image{root: root}
	if im.narrowLib() {
		t.Error("an empty image has a 32-bit /lib")
	}
	link(t, "usr/lib", filepath.Join(root, "lib"))
	for text, want := range map[string]bool{"\x7fELF\x01\x01": true, "\x7fELF\x02\x01": false, "\x7fELF": false, "INPUT(libc.so.6)": false} {
		writeFile(t, filepath.Join(root, "usr/lib/libc.so.6"), text)
		if got := im.narrowLib(); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
}
