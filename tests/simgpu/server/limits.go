// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/tests/simgpu/driver"
	"github.com/gpufence/gpufence/tests/simgpu/wire"
)

var (
	errNotRoot = errors.New("for root only")
	errCgroup  = errors.New("not the folder of a cgroup v2")
)

// unifiedRoot is where the v2 hierarchy is mounted.
func unifiedRoot() string {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if isCgroup2(dir) {
			return dir
		}
	}
	return ""
}

func isCgroup2(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// cgroupOf is the cgroup whose folder a client has open, with the folder.
func cgroupOf(dir *os.File) (cgroup, path string, err error) {
	if dir == nil {
		return "", "", errCgroup
	}
	path, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())))
	if err != nil {
		return "", "", fmt.Errorf("%w: %w", errCgroup, err)
	}
	root := unifiedRoot()
	rest, below := strings.CutPrefix(path, root)
	if root == "" || !below || !isCgroup2(path) || rest != "" && rest[0] != '/' {
		return "", "", fmt.Errorf("%w: %s", errCgroup, path)
	}
	return "/" + strings.TrimPrefix(rest, "/"), path, nil
}

// limits answers the two calls about a cgroup's limits. The caller holds g's lock.
func (s *Server) limits(g *gpu, who driver.Owner, req request) (rep wire.Rep) {
	cgroup, path, err := cgroupOf(req.file)
	s.sweep(g)
	switch {
	case err != nil:
	case req.Op == wire.OpLimitsGet:
		var l driver.Limits
		l, err = g.model.GetLimits(Now(), cgroup)
		rep.Val = [7]uint64{l.SoftBytes, l.HardBytes, l.UsedBytes}
	case who.UID != 0:
		err = errNotRoot
	default:
		var st unix.Stat_t
		if err = unix.Stat(path, &st); err == nil {
			err = g.model.SetLimits(Now(), cgroup, req.Arg[1], req.Arg[2])
		}
		if err == nil {
			g.limited[cgroup] = folder{path, st.Ino}
		}
	}
	rep.Status = status(err)
	s.showDmem(g)
	return rep
}

// folder is a cgroup's, and which of those of that name.
type folder struct {
	path  string
	inode uint64
}

// sweep tells the model of cgroups with a limit that are gone. The caller holds g's lock.
func (s *Server) sweep(g *gpu) {
	for cgroup, f := range g.limited {
		var st unix.Stat_t
		if err := unix.Stat(f.path, &st); err != nil || st.Ino != f.inode {
			g.model.RemoveCgroup(Now(), cgroup)
			delete(g.limited, cgroup)
		}
	}
}

// pays brings up to date which cgroup an open file's next allocation is charged to. The caller holds
// g's lock.
func (s *Server) pays(g *gpu, file *driver.Client, pid int) {
	s.sweep(g)
	if g.model.Knobs().MemoryLimits != driver.BackendDmem {
		return
	}
	if text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup")); err == nil { // else it has ended
		file.SetCgroup(parseUnified(text))
	}
}

// parseUnified is the path in the v2 hierarchy; "" for the root.
func parseUnified(text []byte) string {
	for line := range strings.Lines(string(text)) {
		if p, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && p != "/" {
			return p
		}
	}
	return ""
}

// region is what the GPU is called in the kernel's files.
func region(m *driver.GPU) string {
	d := m.Device()
	return "nvidia/" + d.PCIBusID
}

// showDmem writes what the kernel's dmem controller would show, where a folder for it was given and
// that is the backend. It is for reading: what is written there is nobody's limit. The caller holds g's
// lock.
func (s *Server) showDmem(g *gpu) {
	touched := g.model.Touched()
	if s.cfg.DmemDir == "" || g.model.Knobs().MemoryLimits != driver.BackendDmem {
		return
	}
	for cgroup, a := range touched {
		dir := filepath.Join(s.cfg.DmemDir, cgroup)
		if a == nil {
			for _, name := range []string{"dmem.max", "dmem.min", "dmem.current"} {
				s.said(os.Remove(filepath.Join(dir, name)))
			}
			continue
		}
		limit := "max"
		if a.HardBytes != driver.NoLimit {
			limit = strconv.FormatUint(a.HardBytes, 10)
		}
		s.said(os.MkdirAll(dir, 0o755))
		s.dmemLine(g, dir, "dmem.max", limit)
		s.dmemLine(g, dir, "dmem.min", strconv.FormatUint(a.SoftBytes, 10))
		s.dmemLine(g, dir, "dmem.current", strconv.FormatUint(a.UsedBytes, 10))
	}
}

func (s *Server) said(err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.cfg.Log.Printf("show dmem: %v", err)
	}
}

// dmemLine sets a GPU's line in one of the files, which have one for each region.
func (s *Server) dmemLine(g *gpu, dir, name, value string) {
	s.dmem.Lock()
	defer s.dmem.Unlock()
	file, own := filepath.Join(dir, name), region(g.model)
	text, err := os.ReadFile(file)
	s.said(err)
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		if r, _, _ := strings.Cut(line, " "); r != own {
			out.WriteString(line)
		}
	}
	fmt.Fprintf(&out, "%s %s\n", own, value)
	err = os.WriteFile(file+".new", []byte(out.String()), 0o644)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	s.said(err)
}

// showCapacity writes dmem.capacity of the root, which says which regions there are.
func (s *Server) showCapacity() error {
	if s.cfg.DmemDir == "" {
		return nil
	}
	var out strings.Builder
	for _, g := range s.gpus {
		if m := g.model; m.Config().Instance == 0 && m.Config().Instances == 0 && m.Knobs().MemoryLimits == driver.BackendDmem {
			fmt.Fprintf(&out, "%s %d\n", region(m), m.Config().TotalBytes)
		}
	}
	if err := os.MkdirAll(s.cfg.DmemDir, 0o755); err != nil {
		return fmt.Errorf("show dmem: %w", err)
	}
	if err := os.WriteFile(filepath.Join(s.cfg.DmemDir, "dmem.capacity"), []byte(out.String()), 0o644); err != nil {
		return fmt.Errorf("show dmem: %w", err)
	}
	return nil
}
