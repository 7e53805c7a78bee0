// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// guestLimit is how long a guest may take, from its start to its end.
const guestLimit = 18 * time.Minute

// modules that the kernels of Debian do not have built in.
var modules = []string{"virtio_pci", "9pnet_virtio", "9p", "overlay"}

const initScript = `#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts; mount -t tmpfs shm /dev/shm; mount -t tmpfs tmp /tmp; mount -t tmpfs -o mode=755 run /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup; mount -t tracefs t /sys/kernel/tracing; mount -t bpf b /sys/fs/bpf; mount -t securityfs s /sys/kernel/security
for m in $(cat /modules/order); do insmod /modules/$m || echo "GUEST cannot load $m"; done
ip link set lo up
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /share || echo "GUEST cannot mount its share"
[ ! -f /share/nvidia.ko ] || insmod /share/nvidia.ko || echo "GUEST cannot load the stand-in"
echo "GUEST up $(cut -d' ' -f1 /proc/uptime) $(uname -r) $(cat /sys/kernel/security/lsm)"
if [ -x /share/hostroot ]; then
  mkdir -p /lower /rw /root
  mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /lower
  mount -t tmpfs rw /rw; mkdir /rw/u /rw/w
  mount -t overlay o -o lowerdir=/lower,upperdir=/rw/u,workdir=/rw/w /root
  for d in proc sys dev tmp; do mount --rbind /$d /root/$d; done; mount -t tmpfs -o mode=755 run /root/run
  mkdir -p /root/mnt; mount --rbind /share /root/mnt
  n=0; while read -r d; do
    n=$((n + 1)); mkdir -p /rw/u$n /rw/w$n "/root$d"
    mount -t overlay o -o "lowerdir=/lower$d,upperdir=/rw/u$n,workdir=/rw/w$n" "/root$d" || echo "GUEST cannot mount $d"
  done </share/hidden
  chroot /root /mnt/run >/share/output 2>&1; echo $? >/share/status
else
  /share/run >/share/output 2>&1; echo $? >/share/status
fi
sync; poweroff -f
`

// archive writes a cpio archive of the kind that an initial ramdisk is.
func archive(w io.Writer, files map[string][]byte, modes map[string]uint32) error {
	names := make([]string, 0, len(files))
	for n := range files {
		names = append(names, n)
	}
	slices.Sort(names)
	var b bytes.Buffer
	for i, n := range append(names, "TRAILER!!!") {
		mode := modes[n]
		if mode == 0 {
			mode = 0o100755
		}
		fmt.Fprintf(&b, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
			i+1, mode, 0, 0, 1, 0, len(files[n]), 0, 0, 0, 0, len(n)+1, 0, n)
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
		b.Write(files[n])
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// ramdisk is busybox, the modules in the order of their needs, and the script above.
func ramdisk(t *testing.T, kernel string) []byte {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	files, modes := map[string][]byte{"init": []byte(initScript)}, map[string]uint32{}
	for _, d := range []string{"bin", "dev", "proc", "sys", "tmp", "run", "share", "modules", "etc"} {
		files[d], modes[d] = nil, 0o040755
	}
	if files["bin/busybox"], err = os.ReadFile(busybox); err != nil {
		t.Fatal(err)
	}
	found, err := filepath.Glob(filepath.Join(kernel, "root/lib/modules/*/modules.dep"))
	if err != nil || len(found) != 1 {
		t.Fatalf("modules of %s: %v, %v", kernel, found, err)
	}
	dep, err := os.ReadFile(found[0])
	if err != nil {
		t.Fatal(err)
	}
	needs := map[string][]string{} // path -> paths
	named := map[string]string{}
	for line := range strings.Lines(string(dep)) {
		path, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[path] = strings.Fields(rest)
		name, _, _ := strings.Cut(filepath.Base(path), ".")
		named[strings.ReplaceAll(name, "-", "_")] = path
	}
	var order []string
	var add func(path string)
	add = func(path string) {
		name, _, _ := strings.Cut(filepath.Base(path), ".")
		if _, there := files["modules/"+name+".ko"]; there {
			return
		}
		files["modules/"+name+".ko"] = nil
		for _, n := range needs[path] {
			add(n)
		}
		b, err := os.ReadFile(filepath.Join(filepath.Dir(found[0]), path))
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(path, ".xz") {
			cmd := exec.CommandContext(t.Context(), "xz", "-dc")
			cmd.Stdin = bytes.NewReader(b)
			if b, err = cmd.Output(); err != nil {
				t.Fatalf("unpack %s: %v", path, err)
			}
		}
		files["modules/"+name+".ko"] = b
		order = append(order, name+".ko")
	}
	for _, m := range modules {
		if path, ok := named[m]; ok { // else it is built in
			add(path)
		}
	}
	files["modules/order"] = []byte(strings.Join(order, "\n"))
	var b bytes.Buffer
	if err := archive(&b, files, modes); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// kernelOf gets a kernel by what it is called.
func kernelOf(t *testing.T, which string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "./kernel", which)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("get kernel: %v\n%s", err, errs.String())
	}
	return strings.TrimSpace(string(out))
}

// guest is what one boot does.
type guest struct {
	kernel  string            // folder
	options string            // of the kernel command line
	files   map[string]string // share name -> path here
	run     string            // script
	host    bool              // run it in an overlay of this machine's root
	hidden  []string          // folders of it that lie where the guest has its own: they are put there
	limit   time.Duration
}

// boot runs a guest to its end: what its script printed, its status, and seconds.
func boot(t *testing.T, g guest) (output string, status string, took time.Duration) {
	t.Helper()
	output, status, took, silent := bootOnce(t, g)
	if silent {
		// Seen once of many: a machine that its emulator lets go of, as one that is reset does.
		t.Log("ONCE MORE: the emulator ended, and the guest had neither said why nor come to the end of its tests")
		if output, status, took, silent = bootOnce(t, g); silent {
			t.Fatal("the emulator ended twice before the guest's tests did")
		}
	}
	return output, status, took
}

// troubles are what the console has where the guest's kernel is in trouble.
var troubles = regexp.MustCompile(`BUG:|Oops|[Pp]anic|Call Trace|rcu: INFO|Out of memory|segfault`)

// bootOnce fails the test where the guest or its kernel does; silent: there is nothing that says so, and no result.
func bootOnce(t *testing.T, g guest) (output string, status string, took time.Duration, silent bool) {
	t.Helper()
	dir := t.TempDir()
	share := filepath.Join(dir, "share")
	if err := os.Mkdir(share, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, path := range g.files {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(share, name), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, s string) {
		if err := os.WriteFile(path, []byte(s), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(share, "run"), g.run)
	initrd := filepath.Join(dir, "initrd")
	write(initrd, string(ramdisk(t, g.kernel)))
	// no_timer_check: where this machine is busy the kernel finds its emulated timer too slow to be one.
	// max: everything that the emulator knows. tcg and nothing else: where /dev/kvm is, it may not work.
	args := []string{"-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "1024", "-smp", "2", "-nodefaults", "-no-reboot",
		"-display", "none", "-serial", "stdio", "-kernel", filepath.Join(g.kernel, "vmlinux"), "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 no_timer_check " + g.options,
		"-fsdev", "local,id=share,path=" + share + ",security_model=none", "-device", "virtio-9p-pci,fsdev=share,mount_tag=share"}
	if g.host {
		write(filepath.Join(share, "hostroot"), "")
		hidden := ""
		for _, d := range g.hidden {
			hidden += d + "\n"
		}
		write(filepath.Join(share, "hidden"), hidden)
		args = append(args, "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap", "-device", "virtio-9p-pci,fsdev=root,mount_tag=root")
	}
	limit := g.limit
	if limit == 0 {
		limit = guestLimit
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	start := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var serial []string
	for in := bufio.NewScanner(pipe); in.Scan(); {
		line := strings.TrimRight(in.Text(), "\r")
		serial = append(serial, line)
		if strings.HasPrefix(line, "GUEST") {
			t.Logf("%.1f s: %s", time.Since(start).Seconds(), line)
		}
	}
	err = cmd.Wait()
	took = time.Since(start)
	cpu := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	t.Logf("the emulator took %.0f s of CPU time in %.0f s", cpu.Seconds(), took.Seconds())
	out, _ := os.ReadFile(filepath.Join(share, "output")) // a guest that died leaves none: then its console tells
	st, serr := os.ReadFile(filepath.Join(share, "status"))
	if err != nil || serr != nil {
		// Why comes last: of a long log people are shown the end.
		why := fmt.Sprintf("guest did not end by itself after %.0f s: %v, %v\n%s\n%s", took.Seconds(), err, serr, errs.String(), strings.Join(serial[max(0, len(serial)-60):], "\n"))
		t.Logf("what it said until then:\n%s\n%s", out, why)
		if serr == nil || ctx.Err() != nil || slices.ContainsFunc(serial, troubles.MatchString) {
			t.FailNow()
		}
		return "", "", took, true
	}
	if slices.ContainsFunc(serial, func(l string) bool { return strings.Contains(l, "BUG:") || strings.Contains(l, "Oops") }) {
		t.Errorf("the guest's kernel complains:\n%s", strings.Join(serial, "\n"))
	}
	return string(out), strings.TrimSpace(string(st)), took, false
}

// build makes the programs that run inside.
func build(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"guest.test": filepath.Join(dir, "guest.test"), "client": filepath.Join(dir, "client")}
	compile(t, "CGO_ENABLED=0",
		[]string{"go", "test", "-c", "-o", files["guest.test"], "./guest"},
		[]string{"gcc", "-O2", "-static", "-pthread", "-Wall", "-Wextra", "-o", files["client"], "client/client.c"})
	return files
}

func compile(t *testing.T, env string, commands ...[]string) {
	t.Helper()
	for _, c := range commands {
		cmd := exec.CommandContext(t.Context(), c[0], c[1:]...)
		cmd.Env = append(os.Environ(), env)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
}

func binaryIsELF(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var magic uint32
	if err := binary.Read(f, binary.LittleEndian, &magic); err != nil || magic != 0x464c457f {
		t.Fatalf("%s is no ELF: %x, %v", path, magic, err)
	}
}

// TestGate runs the gate's tests on the kernels that decide, with the stand-in driver.
func TestGate(t *testing.T) {
	t.Parallel()
	files := build(t)
	for _, tt := range []struct{ name, kernel, lsm, expect string }{
		// What Debian boots with, and the same with the word that the gate would like to see.
		{"oldest-with-bpf-lsm", "oldest", "lsm=landlock,lockdown,yama,loadpin,safesetid,integrity,apparmor,bpf", "lsm kprobe"},
		{"oldest-without-bpf-lsm", "oldest", "lsm=landlock,lockdown,yama,loadpin,safesetid,integrity,apparmor", "fmod_ret kprobe"},
		{"newest-with-bpf-lsm", "newest", lsmOfNewest, "lsm btf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			kernel := kernelOf(t, tt.kernel)
			binaryIsELF(t, filepath.Join(kernel, "vmlinux"))
			g := guest{kernel: kernel, options: tt.lsm, files: map[string]string{"nvidia.ko": filepath.Join(kernel, "nvidia.ko")}}
			for n, p := range files {
				g.files[n] = p
			}
			run := os.Getenv("GPUFENCE_GUEST_RUN")
			if run == "" {
				run = "."
			}
			g.run = "#!/bin/sh\nexport GPUFENCE_GUEST='" + tt.expect + "'\ncd /share && exec ./guest.test -test.v -test.timeout 14m -test.run '" + run + "'\n"
			out, status, took := boot(t, g)
			t.Logf("%s, %s: %.1f s\n%s", filepath.Base(kernel), tt.expect, took.Seconds(), out)
			if status != "0" {
				t.Errorf("the guest's tests ended with %s", status)
			}
		})
	}
}

// lsmOfNewest is what the newest kernel boots with, and bpf.
const lsmOfNewest = "lsm=landlock,lockdown,yama,loadpin,safesetid,ipe,ima,evm,apparmor,bpf"

// TestNode runs what gpufence promises of a node where there is only cgroup v2: its hands on cgroups, and the built
// gpufenced. GPUFENCE_GUEST_LONG=1 has all of the enforcer's tests.
func TestNode(t *testing.T) {
	t.Parallel()
	dist := os.Getenv("GPUFENCE_DIST")
	if dist == "" {
		dist = "../../dist"
	}
	dist, err := filepath.Abs(dist)
	if err != nil {
		t.Fatal(err)
	}
	here, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	var hidden []string
	for _, p := range []string{here, dist} {
		within := func(d string) bool { return strings.HasPrefix(p+"/", d+"/") }
		if slices.ContainsFunc([]string{"/tmp", "/run", "/dev"}, within) && !slices.ContainsFunc(hidden, within) {
			hidden = append(hidden, p)
		}
	}
	dir := t.TempDir()
	kernel := kernelOf(t, "newest")
	g := guest{kernel: kernel, options: lsmOfNewest, host: true, hidden: hidden, files: map[string]string{"nvidia.ko": filepath.Join(kernel, "nvidia.ko")}}
	for _, n := range []string{"act.test", "enforcer.test", "daemon.test", "client-follow"} {
		g.files[n] = filepath.Join(dir, n)
	}
	compile(t, "CGO_ENABLED=0",
		[]string{"go", "test", "-c", "-o", g.files["act.test"], "../../enforcer/act"},
		[]string{"go", "test", "-c", "-o", g.files["enforcer.test"], "../enforcer"},
		[]string{"go", "test", "-c", "-o", g.files["daemon.test"], "./daemon"},
		[]string{"gcc", "-O2", "-pthread", "-Wall", "-Wextra", "-DFOLLOW", "-o", g.files["client-follow"], "client/client.c", "-ldl"})
	some := "-test.run '^(TestVictimDiesBystanderLives/unified|TestOOMGroup|TestResize)$'"
	if os.Getenv("GPUFENCE_GUEST_LONG") == "1" {
		g.limit = 100 * time.Minute
		some = "-test.timeout 90m"
	}
	g.run = `#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root GPUFENCE_GUEST='lsm btf' GPUFENCE_PATIENCE=3m GPUFENCE_DIST=` + dist + `
status=0
part() { echo "PART $1 begins at $(cut -d' ' -f1 /proc/uptime) s"; cd "$2" && shift 2 && "$@" || status=1; }
part act ` + here + `/enforcer/act /mnt/act.test -test.v
part daemon /mnt ./daemon.test -test.v
part enforcer ` + here + `/tests/enforcer sh -c "exec /mnt/enforcer.test -test.v -test.parallel 2 ` + some + `"
echo "PART end at $(cut -d' ' -f1 /proc/uptime) s"
exit $status
`
	out, status, took := boot(t, g)
	t.Logf("%s, cgroup v2 only, this machine's files: %.1f s\n%s", filepath.Base(kernel), took.Seconds(), out)
	if status != "0" {
		t.Errorf("the guest's tests ended with %s", status)
	}
}
