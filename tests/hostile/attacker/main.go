// SPDX-License-Identifier: Apache-2.0

// Command attacker is a hostile container's program: it does to the files that gpufence has put
// into its container whatever it can, and says what it was allowed to. It is linked statically, so
// that nothing of ours is loaded into it.
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

const dir = "/dev/gpufence"

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: attacker ATTACK DURATION")
		os.Exit(2)
	}
	until, err := time.ParseDuration(os.Args[2])
	if err == nil {
		err = attack(os.Args[1], time.Now().Add(until))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "attacker: %v\n", err)
		os.Exit(1)
	}
	say(map[string]any{"op": "over"})
	// It stays, with the GPU in its hands, until it is ended. Not by select {}: Go ends a program in which nothing waits
	// for anything.
	for {
		time.Sleep(time.Hour)
	}
}

func say(v map[string]any) {
	v["ok"] = true
	if err := json.NewEncoder(os.Stdout).Encode(v); err != nil {
		os.Exit(3) // nobody reads
	}
}

func attack(name string, until time.Time) error {
	switch name {
	case "read-only":
		return readOnly()
	case "truncate":
		return repeat(until, func() error { return truncate(rand.Int64N(1 << 20)) })
	case "grow":
		return repeat(until, func() error { return truncate(1 << (20 + rand.Int64N(12))) })
	case "scribble":
		return scribble(until, func(b []byte) {
			at := rand.IntN(len(b) - 64)
			for i := range 64 {
				b[at+i] = byte(rand.Uint32())
			}
		})
	case "forge", "exhaust":
		return forge(until, name == "exhaust")
	case "race":
		return scribble(until, func(b []byte) {
			// The header, whole and broken by turns, as fast as it goes.
			b[0x1a] ^= 0xff
		})
	case "fill":
		return fill()
	case "exceed":
		return exceed(until)
	}
	return fmt.Errorf("no attack %q", name)
}

func repeat(until time.Time, f func() error) error {
	n, failed := 0, 0
	for ; time.Now().Before(until); n++ {
		if f() != nil {
			failed++
		}
		time.Sleep(time.Millisecond)
	}
	say(map[string]any{"op": "repeat", "times": n, "failed": failed})
	return nil
}

// readOnly tries to change what is mounted read-only, to get rid of it, and to make more of it.
func readOnly() error {
	names, err := filepath.Glob(dir + "/*")
	if err != nil {
		return err
	}
	names = append(names, dir+"/lib64/libgpufence.so", "/etc/ld.so.preload")
	changed := []string{}
	for _, name := range names {
		if name == dir+"/ledger" {
			continue
		}
		if fi, err := os.Stat(name); err != nil || fi.IsDir() {
			continue
		}
		if f, err := os.OpenFile(name, os.O_RDWR, 0); err == nil {
			f.Close()
			changed = append(changed, name+": opened for writing")
		}
		if os.Truncate(name, 0) == nil {
			changed = append(changed, name+": truncated")
		}
		if os.Remove(name) == nil {
			changed = append(changed, name+": removed")
		}
		if os.Chmod(name, 0o777) == nil {
			changed = append(changed, name+": mode changed")
		}
		if unix.Unmount(name, unix.MNT_DETACH) == nil {
			changed = append(changed, name+": unmounted")
		}
		if unix.Mount("", name, "", unix.MS_REMOUNT|unix.MS_BIND, "") == nil {
			changed = append(changed, name+": remounted")
		}
	}
	folders := []string{dir, dir + "/lib64", dir + "/lib", dir + "/pod"}
	for _, folder := range folders {
		for how, try := range map[string]func() error{
			"file made":      func() error { return os.WriteFile(folder+"/new", nil, 0o644) },
			"folder made":    func() error { return os.Mkdir(folder+"/new-folder", 0o755) },
			"link made":      func() error { return os.Symlink("/", folder+"/new-link") },
			"pipe made":      func() error { return unix.Mkfifo(folder+"/new-pipe", 0o644) },
			"ledger linked":  func() error { return os.Link(dir+"/ledger", folder+"/new-ledger") },
			"limits linked":  func() error { return os.Link(dir+"/limits", folder+"/new-limits") },
			"limits renamed": func() error { return os.Rename(dir+"/limits", folder+"/new-name") },
			"ledger renamed": func() error { return os.Rename(dir+"/ledger", folder+"/new-name") },
			"removed":        func() error { return os.RemoveAll(folder) },
			"mode changed":   func() error { return os.Chmod(folder, 0o777) },
			"owner changed":  func() error { return os.Chown(folder, 1, 1) },
			"unmounted":      func() error { return unix.Unmount(folder, unix.MNT_DETACH) },
			"remounted":      func() error { return unix.Mount("", folder, "", unix.MS_REMOUNT|unix.MS_BIND, "") },
			"mounted over":   func() error { return unix.Mount("none", folder, "tmpfs", 0, "") },
		} {
			if try() == nil {
				changed = append(changed, folder+": "+how)
			}
		}
	}
	if os.Remove(dir+"/ledger") == nil {
		changed = append(changed, dir+"/ledger: removed")
	}
	if unix.Unmount(dir+"/ledger", unix.MNT_DETACH) == nil {
		changed = append(changed, dir+"/ledger: unmounted")
	}
	say(map[string]any{"op": "read-only", "tried": len(names), "folders": len(folders), "changed": changed})
	return nil
}

func truncate(size int64) error { return os.Truncate(dir+"/ledger", size) }

// scribble changes the mapped ledger as fast as it can.
func scribble(until time.Time, f func([]byte)) error {
	b, err := mapped()
	if err != nil {
		return err
	}
	n := 0
	for ; time.Now().Before(until); n++ {
		for range 1000 {
			f(b)
		}
	}
	say(map[string]any{"op": "scribble", "times": n * 1000})
	return nil
}

func mapped() ([]byte, error) {
	f, err := os.OpenFile(dir+"/ledger", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, int(fi.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

// forge makes every slot somebody's: of pids that may be others', with all that a counter can hold;
// with locks where the slots are to be exhausted.
func forge(until time.Time, lock bool) error {
	b, err := mapped()
	if err != nil {
		return err
	}
	const header, slot, perGPU = 4096, 0x80 + 64*16, 64
	count := (len(b) - header) / slot
	if lock {
		f, err := os.OpenFile(dir+"/ledger", os.O_RDWR, 0)
		if err != nil {
			return err
		}
		l := unix.Flock_t{Type: unix.F_WRLCK, Whence: 0, Start: 0, Len: 0} // all of it
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l); err != nil {
			return err
		}
	}
	n := 0
	for ; time.Now().Before(until); n++ {
		for i := range count {
			at := header + i*slot
			pid := uint64(1 + rand.IntN(40000))
			generation := uint64(rand.Uint32() & 0xffffff)
			binary.LittleEndian.PutUint64(b[at:], generation<<40|1<<32|pid)
			binary.LittleEndian.PutUint64(b[at+8:], rand.Uint64())
			for g := range 16 {
				at := at + 0x80 + g*perGPU
				for _, k := range []int{0, 8, 16} {
					binary.LittleEndian.PutUint64(b[at+k:], generation<<40|(1<<40-1))
				}
				for _, k := range []int{0x28, 0x30, 0x38} {
					binary.LittleEndian.PutUint64(b[at+k:], rand.Uint64())
				}
			}
		}
		time.Sleep(time.Millisecond)
	}
	say(map[string]any{"op": "forge", "slots": count, "times": n})
	return nil
}

// fill wants all the space there is.
func fill() error {
	written, files := 0, 0
	block := make([]byte, 1<<20)
	ledger, err := os.OpenFile(dir+"/ledger", os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer ledger.Close()
	for range 256 {
		n, failed := ledger.Write(block)
		written += n
		if failed != nil {
			break // full, as it should be
		}
	}
	// In the ledger's own file system.
	for i := range 1000 {
		f, failed := os.OpenFile(fmt.Sprintf("%s/ledger.%d", dir, i), os.O_CREATE|os.O_WRONLY, 0o600)
		if failed != nil {
			break
		}
		files++
		f.Close()
	}
	say(map[string]any{"op": "fill", "written": written, "files": files})
	return nil
}

// exceed allocates beyond every limit while it scribbles.
func exceed(until time.Time) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		return err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: wire.DirDefault + "/gpu0"}); err != nil {
		return err
	}
	ask := func(r wire.Req) (wire.Rep, error) {
		if _, err := unix.Write(fd, r.Encode()); err != nil {
			return wire.Rep{}, err
		}
		b := make([]byte, wire.PacketMax)
		n, err := unix.Read(fd, b)
		if err != nil {
			return wire.Rep{}, err
		}
		rep, _, err := wire.DecodeRep(b[:n])
		return rep, err
	}
	ctx, err := ask(wire.Req{Op: wire.OpCtxCreate})
	if err != nil {
		return err
	}
	for range 40 { // 100 MiB each
		r, err := ask(wire.Req{Op: wire.OpAlloc, Arg: [7]uint64{ctx.Val[0], 100 << 20, uint64(wire.KindDevice)}})
		if err != nil || r.Status != wire.OK {
			return fmt.Errorf("allocate: status %d: %w", r.Status, err)
		}
	}
	say(map[string]any{"op": "exceed"})
	return forge(until, false)
}
