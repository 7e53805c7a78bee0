// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// slotsName holds the slot count that we chose; no container sees this file.
	slotsName     = "slots"
	containersDir = "containers"
	newPrefix     = ".new-"

	// maxSlots bounds what a slots file may say.
	maxSlots = 1 << 16

	pageBytes = 4096
	// What a container takes: its folders, the limits page, the cgroup-like files.
	containerInodes = 3 + fileCount
	containerPages  = (limitsBytes+pageBytes-1)/pageBytes + fileCount
	// The root, the folder of containers, the slots file, the ledger.
	podInodes = 4
)

// Options say how a pod's folder is made.
type Options struct {
	// Slots of the ledger; 0 means the default, [Slots]. A folder that exists keeps its own.
	Slots int
	// Plain makes a plain folder instead of a tmpfs of exact size (tests, and systems where
	// the caller may not mount).
	Plain bool
	// SELinuxContext is the tmpfs's, when not empty.
	SELinuxContext string
}

// Pod is a pod's folder: its ledger, and a folder with the limits page and the cgroup-like
// files of each container.
type Pod struct {
	dir    string
	plain  bool
	slots  int
	ledger *Ledger
	mu     sync.Mutex // AddContainer and RemoveContainer
}

// CreatePod makes the folder, mounts its tmpfs and creates the ledger. What exists of it is
// adopted, so that CreatePod may be repeated, also after a crash in its middle.
func CreatePod(dir string, opts Options) (*Pod, error) {
	slots := opts.Slots
	if slots == 0 {
		slots = Slots
	}
	if slots < 1 || slots > maxSlots {
		return nil, fmt.Errorf("create pod folder %s: %d slots are not between 1 and %d", dir, slots, maxSlots)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create pod folder: %w", err)
	}
	if !opts.Plain {
		mounted, err := isMount(dir)
		if err != nil {
			return nil, fmt.Errorf("create pod folder: %w", err)
		}
		if !mounted {
			if err := mountTmpfs(dir, slots, opts.SELinuxContext); err != nil {
				return nil, err
			}
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, LedgerName)); errors.Is(err, fs.ErrNotExist) {
		if err := create(dir, slots, opts.Plain); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, fmt.Errorf("create pod folder: %w", err)
	}
	return OpenPod(dir, opts)
}

// OpenPod adopts the folder of a pod after a restart. opts.Slots, if not 0, must be its own. A
// ledger that its pod has broken is adopted as it is: [Ledger.Snapshot] says so.
func OpenPod(dir string, opts Options) (*Pod, error) {
	if !opts.Plain {
		mounted, err := isMount(dir)
		if err != nil {
			return nil, fmt.Errorf("open pod folder: %w", err)
		}
		if !mounted {
			return nil, fmt.Errorf("open pod folder %s: its tmpfs is not mounted", dir)
		}
	}
	path := filepath.Join(dir, slotsName)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("open pod folder: %w", err)
	}
	slots, err := strconv.Atoi(strings.TrimSuffix(string(text), "\n"))
	if err != nil || slots < 1 || slots > maxSlots {
		return nil, fmt.Errorf("open pod folder: %s says %q: not a number of slots", path, text)
	}
	if opts.Slots != 0 && opts.Slots != slots {
		return nil, fmt.Errorf("open pod folder %s: it has %d slots, not %d", dir, slots, opts.Slots)
	}
	l, err := openLedger(filepath.Join(dir, LedgerName), slots)
	if err != nil {
		return nil, err
	}
	return &Pod{dir: dir, plain: opts.Plain, slots: slots, ledger: l}, nil
}

// create writes the slots file, the folder of containers, and last, by rename, the ledger.
func create(dir string, slots int, plain bool) error {
	if err := os.WriteFile(filepath.Join(dir, slotsName), []byte(strconv.Itoa(slots)+"\n"), 0o600); err != nil {
		return fmt.Errorf("create pod folder: %w", err)
	}
	if err := os.Mkdir(filepath.Join(dir, containersDir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create pod folder: %w", err)
	}
	temporary := filepath.Join(dir, newPrefix+LedgerName)
	if err := createLedger(temporary, slots, plain); err != nil {
		return err
	}
	if err := os.Rename(temporary, filepath.Join(dir, LedgerName)); err != nil {
		return fmt.Errorf("create ledger: %w", err)
	}
	return nil
}

// allocate gives a file its size and, on the tmpfs, its pages, so that no later write can fail
// for want of room. In a plain folder the file system may not know fallocate.
func allocate(f *os.File, size int64, plain bool) error {
	if !plain {
		if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
			return fmt.Errorf("allocate %d bytes for %s: %w", size, f.Name(), err)
		}
		return nil
	}
	if err := f.Truncate(size); err != nil {
		return fmt.Errorf("size %s: %w", f.Name(), err)
	}
	return nil
}

func pages(bytes int64) int64 { return (bytes + pageBytes - 1) / pageBytes }

// podPages are the pages of a pod without containers: the ledger and the slots file.
func podPages(slots int) int64 { return pages(ledgerBytes(slots)) + 1 }

func mountTmpfs(dir string, slots int, selinux string) error {
	// mode: containers get the files by bind mounts; on the host only root may reach them, as
	// the ledger is writable for everybody.
	data := fmt.Sprintf("size=%d,nr_inodes=%d,mode=0700", podPages(slots)*pageBytes, podInodes)
	if selinux != "" {
		data += fmt.Sprintf(",context=%q", selinux)
	}
	if err := unix.Mount("gpufence", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		return fmt.Errorf("mount tmpfs on %s (%s): %w", dir, data, err)
	}
	return nil
}

// isMount says whether dir is the root of a tmpfs of its own.
func isMount(dir string) (bool, error) {
	var here, parent unix.Stat_t
	if err := unix.Lstat(dir, &here); err != nil {
		return false, &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if here.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false, &fs.PathError{Op: "open", Path: dir, Err: unix.ENOTDIR}
	}
	up := filepath.Dir(filepath.Clean(dir))
	if err := unix.Lstat(up, &parent); err != nil {
		return false, &fs.PathError{Op: "lstat", Path: up, Err: err}
	}
	if here.Dev == parent.Dev {
		return false, nil
	}
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	if s.Type != unix.TMPFS_MAGIC {
		return false, fmt.Errorf("%s is a mount point, but not of a tmpfs", dir)
	}
	return true, nil
}

// makeRoom grows the tmpfs by what a container takes, if it is not free. What is free is
// free for that container only: the files that a tenant can write have all their pages, and the
// size leaves none over.
func (p *Pod) makeRoom(pages, inodes uint64) error {
	if p.plain {
		return nil
	}
	var s unix.Statfs_t
	if err := unix.Statfs(p.dir, &s); err != nil {
		return fmt.Errorf("make room in %s: %w", p.dir, &fs.PathError{Op: "statfs", Path: p.dir, Err: err})
	}
	if s.Bfree >= pages && s.Ffree >= inodes {
		return nil
	}
	size := int64(s.Blocks)*s.Bsize + int64(pages)*pageBytes - int64(min(s.Bfree, pages))*s.Bsize
	data := fmt.Sprintf("size=%d,nr_inodes=%d", size, s.Files+inodes-min(s.Ffree, inodes))
	if err := unix.Mount("gpufence", p.dir, "tmpfs",
		unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, data); err != nil {
		return fmt.Errorf("make room in %s (%s): %w", p.dir, data, err)
	}
	return nil
}

// Close lets go of the files; they stay, for containers and for the next gpufenced.
func (p *Pod) Close() error { return p.ledger.close() }

// Remove unmounts and deletes the folder, and closes; it may be repeated. What is still mounted
// in a container lives on there.
func (p *Pod) Remove() error {
	err := p.Close()
	if !p.plain {
		// Detached, since a container may have its files mounted.
		if e := unix.Unmount(p.dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); e != nil && !errors.Is(e, unix.EINVAL) && !errors.Is(e, unix.ENOENT) {
			return errors.Join(err, fmt.Errorf("unmount %s: %w", p.dir, e))
		}
		if e := os.Remove(p.dir); e != nil && !errors.Is(e, fs.ErrNotExist) {
			return errors.Join(err, fmt.Errorf("remove pod folder: %w", e))
		}
		return err
	}
	if e := os.RemoveAll(p.dir); e != nil {
		return errors.Join(err, fmt.Errorf("remove pod folder: %w", e))
	}
	return err
}

// Dir is the pod's folder.
func (p *Pod) Dir() string { return p.dir }

// Ledger is the pod's ledger.
func (p *Pod) Ledger() *Ledger { return p.ledger }

// LedgerPath is the pod's ledger on the host.
func (p *Pod) LedgerPath() string { return filepath.Join(p.dir, LedgerName) }

// Containers names the containers whose folders exist, sorted.
func (p *Pod) Containers() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(p.dir, containersDir))
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), newPrefix) {
			names = append(names, e.Name())
		}
	}
	sort.Strings(names)
	return names, nil
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, newPrefix) {
		return fmt.Errorf("container folder name %q cannot be one path element", name)
	}
	return nil
}

// Point is something in a container's folder besides the files that are written here: an empty file
// for another one to be mounted over, or, where Link is not empty, a symbolic link to there.
type Point struct{ Name, Link string }

// AddContainer creates a container's folder, files and points, or adopts them if they exist, and
// adds the points that are missing; adopting makes the writer epoch grow. index is what its
// processes write into their slots; that of an adopted one must be the same.
func (p *Pod) AddContainer(name string, index uint32, points ...Point) (*Container, error) {
	if err := checkName(name); err != nil {
		return nil, fmt.Errorf("add container: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	dir := filepath.Join(p.dir, containersDir, name)
	_, err := os.Lstat(dir)
	switch {
	case err == nil:
		if n := missing(dir, points); n > 0 {
			if err := errors.Join(p.makeRoom(0, n), createPoints(dir, points)); err != nil {
				return nil, err
			}
		}
		return openContainer(dir, index)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("add container: %w", err)
	}
	temporary := filepath.Join(p.dir, containersDir, newPrefix+name)
	if err := os.RemoveAll(temporary); err != nil { // left by a crash
		return nil, fmt.Errorf("add container: %w", err)
	}
	if err := p.makeRoom(containerPages, containerInodes+missing(temporary, points)); err != nil {
		return nil, err
	}
	if err := errors.Join(createContainer(temporary, index, p.plain), createPoints(temporary, points)); err != nil {
		return nil, errors.Join(err, os.RemoveAll(temporary))
	}
	if err := os.Rename(temporary, dir); err != nil {
		return nil, fmt.Errorf("add container: %w", err)
	}
	return openContainer(dir, index)
}

// missing is how many inodes the points take that are not there yet, with their folders.
func missing(dir string, points []Point) uint64 {
	seen := map[string]bool{".": true}
	var n uint64
	for _, point := range points {
		for name := filepath.Clean(point.Name); !seen[name]; name = filepath.Dir(name) {
			seen[name] = true
			if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
				n++
			}
		}
	}
	return n
}

// createPoints makes the points that are not there yet.
func createPoints(dir string, points []Point) error {
	for _, point := range points {
		if !filepath.IsLocal(point.Name) {
			return fmt.Errorf("create %s: it is not in the container's folder", point.Name)
		}
		path := filepath.Join(dir, point.Name)
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := createFolders(dir, filepath.Dir(point.Name)); err != nil {
			return fmt.Errorf("create %s: %w", point.Name, err)
		}
		if point.Link != "" {
			if err := os.Symlink(point.Link, path); err != nil {
				return fmt.Errorf("create %s: %w", point.Name, err)
			}
			continue
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("create %s: %w", point.Name, err)
		}
		// chmod, since the mode of open is cut by our umask.
		if err := errors.Join(f.Chmod(0o444), f.Close()); err != nil {
			return fmt.Errorf("create %s: %w", point.Name, err)
		}
	}
	return nil
}

// createFolders makes a folder and those that it lies in, below dir. A container has them mounted,
// where everybody may look; chmod, since umask cuts the mode.
func createFolders(dir, name string) error {
	if name == "." {
		return nil
	}
	if err := createFolders(dir, filepath.Dir(name)); err != nil {
		return err
	}
	path := filepath.Join(dir, name)
	if err := os.Mkdir(path, 0o700); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return err
	}
	return os.Chmod(path, 0o755)
}

// RemoveContainer deletes a container's folder. Unknown names are no error.
func (p *Pod) RemoveContainer(name string) error {
	if err := checkName(name); err != nil {
		return fmt.Errorf("remove container: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(p.dir, containersDir, name)); err != nil {
		return fmt.Errorf("remove container: %w", err)
	}
	return nil
}
