// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gpufence/gpufence/cmd/internal/runtimesettings"
	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/hook/oci"
)

// preloadFile is the dynamic loader's; the command's has the shim in it.
const preloadFile = "/etc/ld.so.preload"

// runScope is within what ids of `gpufence run` are unique.
const runScope = "gpufence-run"

// runKeys are the keys that are flags of `gpufence run`, with what its help says.
var runKeys = [][2]string{
	{quota.KeyMemoryMax, "most GPU memory, per GPU: 4Gi, 25%, max"},
	{quota.KeyMemoryHigh, "above it allocations and launches are slowed"},
	{quota.KeyMemoryMin, "guaranteed GPU memory"},
	{quota.KeyMemorySwapMax, "most that may spill to host memory"},
	{quota.KeyOOMGroup, "kill the whole command, or its largest process only"},
	{quota.KeyComputeWeight, "share of the GPU's time"},
	{quota.KeyComputeMax, "ceiling of the GPU's time"},
	{quota.KeyRequire, "least level at which it may start: reactive, hard"},
	{quota.KeyGPU, "GPUs: all, 2, a UUID (default: $NVIDIA_VISIBLE_DEVICES, else all)"},
}

func (a *app) run() *cobra.Command {
	values := map[string]*string{}
	var as, name, config string
	cmd := &cobra.Command{
		Use:   "run [--memory.max SIZE] -- COMMAND [ARGUMENT...]",
		Short: "run a command of this machine within limits, without a container",
		Long: "run gives a command a cgroup and a mount namespace of its own, and the fences that a container with these\n" +
			"limits has: the same libraries, files and network as outside, only the granted GPUs in /dev, and a limit on\n" +
			"the memory of each. Its exit status is the command's, signals reach it, and when it ends, what it left\n" +
			"running ends, too. It takes root; --user gives the rights up that could take fences down. CAP_SYS_ADMIN and\n" +
			"CAP_BPF are never passed on.\n\n" +
			"The limit file of the dynamic loader, /etc/ld.so.preload, is another one for the command; where this\n" +
			"machine has none, an empty one is made, which changes nothing for others. /dev is a folder of its own.",
		Example: "  gpufence run --memory.max 4Gi -- python3 train.py\n" +
			"  gpufence run --memory.max 25% --gpu 1 --user nobody -- ./render",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("run takes a command: see `gpufence run --help`")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			annotations := map[string]string{}
			for _, key := range runKeys {
				if cmd.Flags().Changed(key[0]) {
					annotations[quota.Domain+key[0]] = *values[key[0]]
				}
			}
			return a.runCommand(cmd.Context(), runRequest{args: args, annotations: annotations, user: as, name: name, config: config})
		},
	}
	p := cmd.Flags()
	p.SetInterspersed(false)
	for _, key := range runKeys {
		values[key[0]] = p.String(key[0], "", key[1])
	}
	p.StringVar(&as, "user", "", "run the command as this user: NAME or UID, with :GROUP if not the user's own")
	p.StringVar(&name, "name", "", "what gpufence ps calls it (default: the command's name)")
	p.StringVar(&config, "config", "", "gpufenced's configuration (default: $GPUFENCE_CONFIG, else /etc/gpufence/config.toml)")
	return cmd
}

// runRequest is one call of `gpufence run`.
type runRequest struct {
	args               []string
	annotations        map[string]string
	user, name, config string
}

// runCommand does not return where it succeeds: the low-level runtime takes this process over, so that
// signals, the exit status and the terminal are its business, and nobody is left to clean up after.
func (a *app) runCommand(ctx context.Context, r runRequest) error {
	if os.Geteuid() != 0 {
		return quota.NewError(quota.CodeRootless, "gpufence run makes cgroups and mounts, which takes root").WithHint("start it with sudo, and give --user to run the command as somebody else")
	}
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		return runFailed("find gpufence's programs: %w", err)
	}
	settings, settingsErr := runtimesettings.Load(cmp.Or(r.config, a.getenv("GPUFENCE_CONFIG")))
	if settings.HookPath == "" {
		settings.HookPath = filepath.Join(filepath.Dir(self), "gpufence-hook")
	}
	w := oci.Wrapper{Env: os.Environ(), Stderr: a.stderr, Settings: settings, SettingsErr: settingsErr}
	low, err := w.Runtime()
	if err != nil {
		return err
	}
	if filepath.Base(low) == "nvidia-container-runtime" {
		// It would look for containers' images; the command has the machine's own driver.
		w.Settings.Runtimes = []string{"runc", "crun"}
		if low, err = w.Runtime(); err != nil {
			return err
		}
	}
	host, err := readHost()
	if err != nil {
		return err
	}
	spec, id, err := runSpec(r, host)
	if err != nil {
		return err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return runFailed("write the command's configuration: %w", err)
	}
	// Before the mount namespace is ours: what gpufenced mounts for the command must be in it.
	edited, notices, err := w.Edit(ctx, api.ContainerKey{Engine: quota.EngineOCI, Scope: runScope, ID: id}, "/", text)
	for _, n := range notices {
		fmt.Fprintln(a.stderr, oneSentence(errors.New(n)))
	}
	if err != nil {
		return err
	}
	var fenced specs.Spec
	if err := json.Unmarshal(edited, &fenced); err != nil {
		return runFailed("read the command's configuration: %w", err)
	}
	onlyOfThisMachine(&fenced, host)
	return a.execIn(low, id, fenced)
}

func runFailed(format string, args ...any) error {
	return quota.NewError(quota.CodeRunFailed, format, args...)
}

// hostView is what of this machine decides how a command's configuration looks.
type hostView struct {
	env          []string
	cwd          string
	terminal     bool
	capabilities uint64 // what this process has
	dev          []specs.Mount
	gpus         []specs.LinuxDevice // NVIDIA's devices
}

// withoutCapabilities are those with which a process could take its fences down: CAP_SYS_ADMIN, CAP_BPF.
var withoutCapabilities = []int{unix.CAP_SYS_ADMIN, unix.CAP_BPF}

// capabilityNames are the kernel's, by number.
var capabilityNames = strings.Fields("CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE " +
	"NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE " +
	"SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF " +
	"CHECKPOINT_RESTORE")

func capabilities(mask uint64) []string {
	var out []string
	for i, name := range capabilityNames {
		if mask&(1<<i) != 0 && !slices.Contains(withoutCapabilities, i) {
			out = append(out, "CAP_"+name)
		}
	}
	return out
}

// runSpec is the configuration of a command before it is fenced, and the id that it gets.
func runSpec(r runRequest, host hostView) (specs.Spec, string, error) {
	random := make([]byte, 4)
	if _, err := rand.Read(random); err != nil {
		return specs.Spec{}, "", runFailed("make an id: %w", err)
	}
	id := notInName.ReplaceAllString(cmp.Or(r.name, filepath.Base(r.args[0])), "-")
	id = strings.TrimLeft(id[:min(len(id), 40)], "-._") + "-" + hex.EncodeToString(random)
	id = strings.TrimLeft(id, "-")
	held := capabilities(host.capabilities)
	process := &specs.Process{
		Terminal: host.terminal, Args: r.args, Env: host.env, Cwd: host.cwd,
		Capabilities: &specs.LinuxCapabilities{Bounding: held, Effective: held, Permitted: held},
	}
	if r.user != "" {
		who, home, err := lookUser(r.user)
		if err != nil {
			return specs.Spec{}, "", err
		}
		process.User = who
		if who.UID != 0 {
			process.Capabilities = &specs.LinuxCapabilities{}
		}
		if home != "" {
			process.Env = append(slices.Clone(process.Env), "HOME="+home)
		}
	}
	annotations := r.annotations
	if _, chosen := annotations[quota.Domain+quota.KeyGPU]; chosen {
		process.Env = slices.DeleteFunc(slices.Clone(process.Env), isVisible)
	} else if !slices.ContainsFunc(process.Env, isVisible) {
		annotations[quota.Domain+quota.KeyGPU] = "all"
	}
	allow := []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	return specs.Spec{
		Version: specs.Version, Root: &specs.Root{Path: "/"}, Process: process, Annotations: annotations,
		Mounts: append([]specs.Mount{{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}}}, host.dev...),
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: specs.MountNamespace}}, CgroupsPath: "/gpufence-run-" + id,
			Resources: &specs.LinuxResources{Devices: allow}, RootfsPropagation: "rslave",
		},
	}, id, nil
}

var notInName = regexp.MustCompile(`[^a-zA-Z0-9_.-]+`)

func isVisible(e string) bool { return strings.HasPrefix(e, "NVIDIA_VISIBLE_DEVICES=") }

// lookUser reads NAME, UID, and either with :GROUP.
func lookUser(text string) (specs.User, string, error) {
	name, group, hasGroup := strings.Cut(text, ":")
	var who specs.User
	home := ""
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err == nil {
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return who, "", runFailed("read user %s: %w", name, err)
		}
		who, home = specs.User{UID: uint32(uid), GID: uint32(gid)}, u.HomeDir
		groups, err := u.GroupIds()
		if err != nil {
			return who, "", runFailed("find the groups of user %s: %w", name, err)
		}
		for _, g := range groups {
			if n, err := strconv.ParseUint(g, 10, 32); err == nil {
				who.AdditionalGids = append(who.AdditionalGids, uint32(n))
			}
		}
	} else {
		uid, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			return who, "", usagef("--user %q: there is no such user", text)
		}
		who = specs.User{UID: uint32(uid), GID: uint32(uid)}
	}
	if hasGroup {
		g, err := user.LookupGroup(group)
		if err == nil {
			group = g.Gid
		}
		gid, err := strconv.ParseUint(group, 10, 32)
		if err != nil {
			return who, "", usagef("--user %q: there is no such group", text)
		}
		who.GID, who.AdditionalGids = uint32(gid), nil
	}
	return who, home, nil
}

// onlyOfThisMachine takes out what CDI adds for a file system that has no driver: this machine's has
// it, and its files are not to be changed. What stays are devices, variables, and what is ours. GPUs
// that were not granted are denied by their numbers, too.
func onlyOfThisMachine(s *specs.Spec, host hostView) {
	s.Mounts = slices.DeleteFunc(s.Mounts, func(m specs.Mount) bool {
		return m.Destination != preloadFile && m.Destination != "/dev" && !strings.HasPrefix(m.Destination, "/dev/") &&
			!strings.Contains(m.Source, "/gpufence-stub/")
	})
	if h := s.Hooks; h != nil {
		ours := func(list []specs.Hook) []specs.Hook {
			return slices.DeleteFunc(list, func(hook specs.Hook) bool { return filepath.Base(hook.Path) != "gpufence-hook" })
		}
		s.Hooks = &specs.Hooks{CreateRuntime: ours(h.CreateRuntime), Poststop: ours(h.Poststop)}
	}
	rules := []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	for _, gpu := range host.gpus {
		if slices.ContainsFunc(s.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Major == gpu.Major && d.Minor == gpu.Minor }) {
			continue
		}
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: false, Type: "c", Major: &gpu.Major, Minor: &gpu.Minor, Access: "rwm"})
	}
	if s.Linux.Resources == nil {
		s.Linux.Resources = &specs.LinuxResources{}
	}
	s.Linux.Resources.Devices = rules
}

// Of /dev: what the runtime makes itself, consoles of the machine, and what is no device.
var notFromDev = regexp.MustCompile(`^(null|zero|full|random|urandom|tty|tty[0-9]+|console|ptmx|fd|stdin|stdout|stderr|core|vcs.*|gpufence|simgpu|nvidia.*)$`)

func readHost() (hostView, error) {
	h := hostView{env: os.Environ()}
	var err error
	if h.cwd, err = os.Getwd(); err != nil {
		return h, runFailed("find the working directory: %w", err)
	}
	h.terminal = true
	for _, fd := range []int{0, 1, 2} {
		if _, err := unix.IoctlGetTermios(fd, unix.TCGETS); err != nil {
			h.terminal = false
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return h, runFailed("read this process's capabilities: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "CapPrm:"); ok {
			if h.capabilities, err = strconv.ParseUint(strings.TrimSpace(value), 16, 64); err != nil {
				return h, runFailed("read this process's capabilities: %w", err)
			}
		}
	}
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return h, runFailed("list /dev: %w", err)
	}
	for _, e := range entries {
		source := filepath.Join("/dev", e.Name())
		if notFromDev.MatchString(e.Name()) {
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 {
			// Such as /dev/log. Links within /dev name what is there, too.
			target, err := filepath.EvalSymlinks(source)
			if err != nil || strings.HasPrefix(target, "/dev/") || strings.HasPrefix(target, "/proc/") {
				continue
			}
			source = target
		}
		h.dev = append(h.dev, specs.Mount{Destination: filepath.Join("/dev", e.Name()), Type: "bind", Source: source, Options: []string{"rbind", "nosuid", "noexec"}})
	}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/nvidia-caps/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return h, runFailed("list NVIDIA's devices: %w", err)
		}
		for _, path := range found {
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
				continue
			}
			h.gpus = append(h.gpus, specs.LinuxDevice{Path: path, Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev))})
		}
	}
	return h, nil
}

// bundleRoots are folders that every machine has and no program needs to be started from: in a mount
// namespace of our own one of them gets the bundle, so that nothing of it is ever on a disk or left.
var bundleRoots = []string{"/mnt", "/media", "/srv", "/boot"}

// execIn makes the mount namespace with the bundle in it, and becomes the low-level runtime there.
func (a *app) execIn(low, id string, spec specs.Spec) error {
	dir := ""
	for _, d := range bundleRoots {
		if info, err := os.Lstat(d); err == nil && info.IsDir() && !strings.HasPrefix(spec.Process.Cwd+"/", d+"/") && !strings.HasPrefix(low, d+"/") {
			dir = d
			break
		}
	}
	if dir == "" {
		return runFailed("none of the folders %s is here to hold the command's configuration", strings.Join(bundleRoots, ", "))
	}
	// A mount needs a file to lie on.
	switch f, err := os.OpenFile(preloadFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644); {
	case err == nil:
		if err := f.Close(); err != nil {
			return runFailed("make %s: %w", preloadFile, err)
		}
	case !errors.Is(err, fs.ErrExist):
		return runFailed("make %s, on which the command's own one is mounted: %w", preloadFile, err)
	}
	root := filepath.Join(dir, "rootfs")
	spec.Root.Path = root
	text, err := json.Marshal(spec)
	if err != nil {
		return runFailed("write the command's configuration: %w", err)
	}
	runtime.LockOSThread() // the namespace is the thread's, and exec keeps the thread that called it
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return runFailed("make a mount namespace: %w", err)
	}
	for _, m := range []struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}{
		{"", "/", "", unix.MS_REC | unix.MS_SLAVE, ""},
		{"tmpfs", dir, "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "size=16m,mode=700"},
	} {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return runFailed("mount %s: %w", m.target, err)
		}
	}
	if err := errors.Join(os.Mkdir(root, 0o755), os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600)); err != nil {
		return runFailed("write the command's configuration: %w", err)
	}
	if err := unix.Mount("/", root, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return runFailed("bind / for the command: %w", err)
	}
	// In the command's view the folder is as it was.
	if err := unix.Unmount(filepath.Join(root, dir), unix.MNT_DETACH); err != nil {
		return runFailed("uncover %s for the command: %w", dir, err)
	}
	argv := []string{low, "--root", filepath.Join(dir, "state"), "run", "--bundle", dir, id}
	if err := syscall.Exec(low, argv, os.Environ()); err != nil {
		return quota.NewError(quota.CodeRuntimeExec, "cannot execute the low-level runtime %s: %w", low, err)
	}
	return nil
}
