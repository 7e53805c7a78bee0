// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Names of the cgroup-like files of a container, and of the folder in which the same names say what
// holds for its pod. In the first what holds for the container is shown: the lower of its own limit
// and the pod's.
const (
	MaxName         = "memory.max"
	HighName        = "memory.high"
	MinName         = "memory.min"
	SwapMaxName     = "memory.swap.max"
	CurrentName     = "memory.current"
	PeakName        = "memory.peak"
	OOMGroupName    = "memory.oom.group"
	EventsName      = "memory.events"
	EventsLocalName = "memory.events.local"
	PodDirName      = "pod"
)

// levelFiles are written for each level; the first four of the container's were the only ones once,
// so that a folder that is adopted may lack the rest.
var levelFiles = [...]string{MaxName, CurrentName, PeakName, EventsName, HighName, MinName, SwapMaxName, OOMGroupName, EventsLocalName}

const (
	oldFiles  = 4
	fileCount = 17 // both levels', memory.oom.group is the container's
)

var _ [0]struct{} = [fileCount - (2*len(levelFiles) - 1)]struct{}{}

var fileNames = func() (names [fileCount]string) {
	n := copy(names[:], levelFiles[:])
	for _, f := range levelFiles {
		if f != OOMGroupName {
			names[n] = PodDirName + "/" + f
			n++
		}
	}
	return names
}()

// Container is a container's page and files. gpufenced alone writes them; a container has them
// mounted, so they are only ever changed in place.
type Container struct {
	dir   string
	index uint32

	mu   sync.Mutex
	page *mapping
	has  [fileCount]bool // false: an adopted folder lacks it
	last [fileCount][]byte
}

// createContainer writes a whole folder that nobody sees yet.
func createContainer(dir string, index uint32, plain bool) error {
	if err := createFolders(filepath.Dir(dir), filepath.Base(dir)); err != nil {
		return fmt.Errorf("create container folder: %w", err)
	}
	bootID, err := readBootID("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("create limits page: %w", err)
	}
	page := make([]byte, limitsBytes)
	le := binary.LittleEndian
	le.PutUint64(page[limitsMagic:], LimitsMagic)
	le.PutUint16(page[limitsMajor:], ABIMajor)
	le.PutUint16(page[limitsMinor:], ABIMinor)
	le.PutUint32(page[limitsHeaderBytes:], limitsCopies)
	le.PutUint64(page[limitsTotalBytes:], limitsBytes)
	le.PutUint32(page[limitsContainerIndex:], index)
	le.PutUint32(page[limitsGPUSize:], limitsGPUBytes)
	le.PutUint32(page[limitsCopySize:], limitsCopyBytes)
	copy(page[limitsBootID:], bootID[:])
	empty := encodeCopy(Limits{})
	copy(page[limitsCopies:], empty)
	copy(page[limitsCopies+limitsCopyBytes:], empty)
	if err := writeNew(filepath.Join(dir, LimitsName), page, plain); err != nil {
		return fmt.Errorf("create limits page: %w", err)
	}
	if err := createFolders(dir, PodDirName); err != nil {
		return fmt.Errorf("create container folder: %w", err)
	}
	for _, name := range fileNames {
		if err := writeNew(filepath.Join(dir, name), nil, plain); err != nil {
			return fmt.Errorf("create %s: %w", name, err)
		}
	}
	return nil
}

// writeNew creates a file that everybody may read, with one page allocated at least.
func writeNew(path string, content []byte, plain bool) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// chmod, since the mode of open is cut by our umask.
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	if len(content) > 0 {
		if err := allocate(f, int64(len(content)), plain); err != nil {
			return err
		}
		_, err = f.WriteAt(content, 0)
		return err
	}
	// The cgroup-like files start empty but own a page, which shrinking to 0 would give back.
	_, err = f.WriteAt([]byte("\n"), 0)
	return err
}

func readBootID(path string) (id [16]byte, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return id, err
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(text)), "-", ""))
	if err != nil || len(raw) != len(id) {
		return id, fmt.Errorf("read %s: %q is no boot id", path, text)
	}
	copy(id[:], raw)
	return id, nil
}

func openContainer(dir string, index uint32) (*Container, error) {
	c := &Container{dir: dir, index: index}
	if err := c.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open container folder: %w", err), c.Close())
	}
	return c, nil
}

func (c *Container) open() (err error) {
	path := filepath.Join(c.dir, LimitsName)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	// The mapping outlives the file.
	defer func() { err = errors.Join(err, f.Close()) }()
	content, err := readAll(f, limitsBytes)
	if err != nil {
		return err
	}
	head, err := parseLimitsHeader(path, content)
	if err != nil {
		return err
	}
	if head.ContainerIndex != c.index {
		return fmt.Errorf("%s is of container index %d, not %d", path, head.ContainerIndex, c.index)
	}
	if c.page, err = mapShared(f, 0, limitsBytes); err != nil {
		return err
	}
	err = c.page.guarded(func() error {
		c.page.store(limitsWriterEpoch, c.page.load(limitsWriterEpoch)+1)
		return nil
	})
	if err != nil {
		return err
	}
	for i, name := range fileNames {
		info, err := os.Lstat(filepath.Join(c.dir, name))
		switch {
		case err == nil && !info.Mode().IsRegular():
			return fmt.Errorf("%s is not a regular file", filepath.Join(c.dir, name))
		case err == nil:
			c.has[i] = true
		case i < oldFiles || !errors.Is(err, fs.ErrNotExist):
			return err
		}
	}
	return nil
}

// Dir is the folder on the host; the files in it are [LimitsName], [MaxName], [CurrentName],
// [PeakName] and [EventsName].
func (c *Container) Dir() string { return c.dir }

// Index is what the container's processes write into their slots.
func (c *Container) Index() uint32 { return c.index }

// Publish puts limits before the shims. It is cheap when nothing changed.
func (c *Container) Publish(l Limits) error {
	if len(l.GPU) > GPUs {
		return fmt.Errorf("publish limits in %s: %d GPUs are more than %d", c.dir, len(l.GPU), GPUs)
	}
	return c.withPage(func(m *mapping) error {
		fresh := encodeCopy(l)
		latch := m.load(limitsLatch)
		if bytes.Equal(loadCopy(m, latch), fresh) {
			return nil
		}
		// Readers of the present latch read the other copy, and whoever still reads this one
		// sees the latch change. Stores in Go are sequentially consistent: none of the next
		// update's can be seen before this latch.
		base := copyOffset(latch + 1)
		for i := 0; i < limitsCopyBytes; i += 8 {
			m.store(base+i, binary.LittleEndian.Uint64(fresh[i:]))
		}
		m.store(limitsLatch, latch+1)
		return nil
	})
}

// Published is what the page says now.
func (c *Container) Published() (v LimitsView, err error) {
	err = c.withPage(func(m *mapping) error {
		content := make([]byte, limitsBytes)
		for i := 0; i < limitsBytes; i += 8 {
			binary.LittleEndian.PutUint64(content[i:], m.load(i))
		}
		v, err = parseLimits(m.path, content)
		return err
	})
	return v, err
}

// Beat moves the heartbeat; call it at least every second.
func (c *Container) Beat() error { return c.Tick(0) }

// BeginSample publishes the number of the NVML sample that is about to be taken. It must
// happen before the NVML call, for all limits pages of a pod with the same number, and the
// ledger must be read at least once before the number grows again.
func (c *Container) BeginSample(n uint64) error {
	return c.withPage(func(m *mapping) error {
		m.store(limitsSample, n)
		return nil
	})
}

// Tick moves the heartbeat and begins a sample at once; 0 begins none.
func (c *Container) Tick(n uint64) error {
	return c.withPage(func(m *mapping) error {
		m.store(limitsHeartbeat, m.load(limitsHeartbeat)+1)
		if n != 0 {
			m.store(limitsSample, n)
		}
		return nil
	})
}

func (c *Container) withPage(f func(*mapping) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return fmt.Errorf("write limits page in %s: %w", c.dir, fs.ErrClosed)
	}
	return c.page.guarded(func() error { return f(c.page) })
}

// Close lets go of the page; the files stay.
func (c *Container) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return nil
	}
	err := c.page.unmap()
	c.page = nil
	return err
}

func copyOffset(latch uint64) int { return limitsCopies + int(latch&1)*limitsCopyBytes }

func loadCopy(m *mapping, latch uint64) []byte {
	content := make([]byte, limitsCopyBytes)
	base := copyOffset(latch)
	for i := 0; i < limitsCopyBytes; i += 8 {
		binary.LittleEndian.PutUint64(content[i:], m.load(base+i))
	}
	return content
}

func encodeCopy(l Limits) []byte {
	b := make([]byte, limitsCopyBytes)
	le := binary.LittleEndian
	le.PutUint64(b[limitsCopyGeneration:], l.Generation)
	le.PutUint32(b[limitsCopyGPUCount:], uint32(len(l.GPU)))
	for i := range l.GPU {
		g := &l.GPU[i]
		e := b[limitsCopyGPU+i*limitsGPUBytes:]
		copy(e[limitsGPUUUID:], g.UUID[:])
		var flags uint64
		if g.Present {
			flags |= gpuPresent
		}
		if g.Fenced {
			flags |= gpuFenced
		}
		le.PutUint64(e[limitsGPUFlags:], flags)
		le.PutUint64(e[limitsGPUTotal:], g.TotalBytes)
		le.PutUint64(e[limitsGPUContext:], g.ContextBytes)
		le.PutUint64(e[limitsGPUMax:], g.MaxBytes)
		le.PutUint64(e[limitsGPUHigh:], g.HighBytes)
		le.PutUint64(e[limitsGPUSwapMax:], g.SwapMaxBytes)
		le.PutUint64(e[limitsGPUPodMax:], g.PodMaxBytes)
		le.PutUint64(e[limitsGPUPodHigh:], g.PodHighBytes)
		le.PutUint64(e[limitsGPUPodSwapMax:], g.PodSwapMaxBytes)
		le.PutUint64(e[limitsGPUExcess:], g.ExcessBytes)
		le.PutUint64(e[limitsGPUPodExcess:], g.PodExcessBytes)
		le.PutUint64(e[limitsGPUModule:], g.ModuleBytes)
	}
	le.PutUint32(b[limitsCopyCRC:], crc32.Checksum(b, castagnoli))
	return b
}

func decodeCopy(b []byte) (Limits, error) {
	le := binary.LittleEndian
	sum := le.Uint32(b[limitsCopyCRC:])
	whole := bytes.Clone(b[:limitsCopyBytes])
	le.PutUint32(whole[limitsCopyCRC:], 0)
	if got := crc32.Checksum(whole, castagnoli); got != sum {
		return Limits{}, fmt.Errorf("checksum is %#x, the content's %#x", sum, got)
	}
	n := le.Uint32(b[limitsCopyGPUCount:])
	if n > GPUs {
		return Limits{}, fmt.Errorf("%d GPUs are more than %d", n, GPUs)
	}
	l := Limits{Generation: le.Uint64(b[limitsCopyGeneration:])}
	for i := 0; i < int(n); i++ {
		e := b[limitsCopyGPU+i*limitsGPUBytes:]
		flags := le.Uint64(e[limitsGPUFlags:])
		g := LimitsGPU{
			Present:         flags&gpuPresent != 0,
			Fenced:          flags&gpuFenced != 0,
			TotalBytes:      le.Uint64(e[limitsGPUTotal:]),
			ContextBytes:    le.Uint64(e[limitsGPUContext:]),
			MaxBytes:        le.Uint64(e[limitsGPUMax:]),
			HighBytes:       le.Uint64(e[limitsGPUHigh:]),
			SwapMaxBytes:    le.Uint64(e[limitsGPUSwapMax:]),
			PodMaxBytes:     le.Uint64(e[limitsGPUPodMax:]),
			PodHighBytes:    le.Uint64(e[limitsGPUPodHigh:]),
			PodSwapMaxBytes: le.Uint64(e[limitsGPUPodSwapMax:]),
			ExcessBytes:     le.Uint64(e[limitsGPUExcess:]),
			PodExcessBytes:  le.Uint64(e[limitsGPUPodExcess:]),
			ModuleBytes:     le.Uint64(e[limitsGPUModule:]),
		}
		copy(g.UUID[:], e[limitsGPUUUID:])
		l.GPU = append(l.GPU, g)
	}
	return l, nil
}

func parseLimitsHeader(path string, b []byte) (LimitsView, error) {
	broken := func(format string, args ...any) (LimitsView, error) {
		return LimitsView{}, &BrokenError{Path: path, Why: fmt.Sprintf(format, args...)}
	}
	if len(b) < limitsBytes {
		return broken("%d bytes are less than %d", len(b), limitsBytes)
	}
	le := binary.LittleEndian
	if v := le.Uint64(b[limitsMagic:]); v != LimitsMagic {
		return broken("magic is %#x, not %#x", v, LimitsMagic)
	}
	if v := le.Uint16(b[limitsMajor:]); v != ABIMajor {
		return broken("ABI is %d, not %d", v, ABIMajor)
	}
	if h, g, c := le.Uint32(b[limitsHeaderBytes:]), le.Uint32(b[limitsGPUSize:]), le.Uint32(b[limitsCopySize:]); h != limitsCopies || g != limitsGPUBytes || c != limitsCopyBytes {
		return broken("sizes are %d, %d, %d, not %d, %d, %d", h, g, c, limitsCopies, limitsGPUBytes, limitsCopyBytes)
	}
	return LimitsView{
		ContainerIndex: le.Uint32(b[limitsContainerIndex:]),
		WriterEpoch:    le.Uint64(b[limitsWriterEpoch:]),
		Heartbeat:      le.Uint64(b[limitsHeartbeat:]),
		Sample:         le.Uint64(b[limitsSample:]),
	}, nil
}

func parseLimits(path string, b []byte) (LimitsView, error) {
	v, err := parseLimitsHeader(path, b)
	if err != nil {
		return LimitsView{}, err
	}
	latch := binary.LittleEndian.Uint64(b[limitsLatch:])
	if v.Limits, err = decodeCopy(b[copyOffset(latch):]); err != nil {
		return LimitsView{}, &BrokenError{Path: path, Why: err.Error()}
	}
	return v, nil
}

// ReadLimits reads a limits page. The page may be written meanwhile: a copy that does not fit
// its checksum is read again.
func ReadLimits(path string) (v LimitsView, err error) {
	f, err := os.Open(path)
	if err != nil {
		return v, fmt.Errorf("read limits page: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for range 8 {
		var b []byte
		if b, err = readAll(f, limitsBytes); err != nil {
			return LimitsView{}, fmt.Errorf("read limits page: %w", err)
		}
		if v, err = parseLimits(path, b); err == nil {
			return v, nil
		}
	}
	return LimitsView{}, err
}

// readAll reads up to n bytes from the start; less is no error here.
func readAll(f *os.File, n int) ([]byte, error) {
	b := make([]byte, n)
	got, err := f.ReadAt(b, 0)
	if err != nil && got == n {
		err = nil
	}
	if err != nil && !errors.Is(err, errEOF) {
		return nil, err
	}
	return b[:got], nil
}

// FileGPU is a container's row for one GPU in the cgroup-like files, one line for each GPU as in
// the kernel's dmem files: "GPU-... 4294967296", "GPU-... max", and for memory.events the
// nested-keyed form "GPU-... high=0 max=3 device=0 oom=0 oom_kill=0 oom_group_kill=0".
type FileGPU struct {
	UUID string
	FileLevel
	Pod FileLevel
}

// FileLevel is what is written of one level on one GPU.
type FileLevel struct {
	Max     uint64 // Unlimited is written as max, here and below
	High    uint64
	Min     uint64
	SwapMax uint64
	Current uint64
	Peak    uint64
	Events  FileEvents
	Local   FileEvents
}

// FileEvents are the counters of memory.events.
type FileEvents struct{ High, Max, Device, OOM, OOMKill, OOMGroupKill uint64 }

// row is the line of a file, without the GPU.
func (l *FileLevel) row(name string) string {
	limit := func(b uint64) string {
		if b == Unlimited {
			return "max"
		}
		return strconv.FormatUint(b, 10)
	}
	events := func(e FileEvents) string {
		return fmt.Sprintf("high=%d max=%d device=%d oom=%d oom_kill=%d oom_group_kill=%d", e.High, e.Max, e.Device, e.OOM, e.OOMKill, e.OOMGroupKill)
	}
	switch name {
	case MaxName:
		return limit(l.Max)
	case HighName:
		return limit(l.High)
	case MinName:
		return limit(l.Min)
	case SwapMaxName:
		return limit(l.SwapMax)
	case CurrentName:
		return strconv.FormatUint(l.Current, 10)
	case PeakName:
		return strconv.FormatUint(l.Peak, 10)
	case EventsLocalName:
		return events(l.Local)
	}
	return events(l.Events)
}

// WriteFiles writes the cgroup-like files, each with one write on the inode that the container
// has mounted. Content that did not change is not written.
func (c *Container) WriteFiles(oomGroup bool, gpus []FileGPU) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.page == nil {
		return fmt.Errorf("write memory files in %s: %w", c.dir, fs.ErrClosed)
	}
	var errs []error
	for i, name := range fileNames {
		if !c.has[i] {
			continue
		}
		var text bytes.Buffer
		level, ofPod := strings.CutPrefix(name, PodDirName+"/")
		switch {
		case level == OOMGroupName && oomGroup:
			text.WriteString("1\n")
		case level == OOMGroupName:
			text.WriteString("0\n")
		default:
			for k := range gpus {
				l := &gpus[k].FileLevel
				if ofPod {
					l = &gpus[k].Pod
				}
				fmt.Fprintf(&text, "%s %s\n", gpus[k].UUID, l.row(level))
			}
		}
		content := text.Bytes()
		if c.last[i] != nil && bytes.Equal(c.last[i], content) {
			continue
		}
		if err := overwrite(filepath.Join(c.dir, name), content); err != nil {
			errs = append(errs, fmt.Errorf("write %s: %w", name, err))
			continue
		}
		c.last[i] = bytes.Clone(content)
	}
	return errors.Join(errs...)
}

// maxFileBytes is more than any of the files has.
const maxFileBytes = 64 << 10

// overwrite replaces a file's content on its inode. A reader that comes between write and
// truncate sees empty lines at the end, never a rest of the old content. The file is opened for it,
// as most of them hardly ever change: with all of them open, a thousand containers take more
// descriptors than a process may have.
func overwrite(path string, content []byte) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	out := content
	if info.Size() > maxFileBytes { // not by us: nobody reads such a file, and nobody keeps it in memory
		if err := f.Truncate(int64(len(content))); err != nil {
			return err
		}
	} else if pad := info.Size() - int64(len(content)); pad > 0 {
		out = append(bytes.Clone(content), bytes.Repeat([]byte("\n"), int(pad))...)
	}
	if _, err := f.WriteAt(out, 0); err != nil {
		return err
	}
	if len(out) > len(content) && len(content) > 0 {
		return f.Truncate(int64(len(content)))
	}
	return nil
}

// ParseUUID gives the raw 16 bytes of "GPU-8-4-4-4-12" or "MIG-...", as cuDeviceGetUuid does.
func ParseUUID(s string) (id [16]byte, err error) {
	digits, ok := strings.CutPrefix(s, "GPU-")
	if !ok {
		digits, ok = strings.CutPrefix(s, "MIG-")
	}
	if !ok || len(digits) != 36 || digits[8] != '-' || digits[13] != '-' || digits[18] != '-' || digits[23] != '-' {
		return id, fmt.Errorf("parse GPU UUID %q: want GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", s)
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(digits, "-", ""))
	if err != nil || len(raw) != len(id) {
		return id, fmt.Errorf("parse GPU UUID %q: want GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", s)
	}
	copy(id[:], raw)
	return id, nil
}
