// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0

// The gate: what a managed container asks NVIDIA's driver for is weighed before the driver sees it.
//
// What it keeps:
//   - Only programs write `usages`, by atomic additions; only gpufenced writes `policies`, `devices`,
//     `exempt` and `configuration`. So neither can lose what the other wrote.
//   - A charge is weighed against every managed cgroup above the task and added only where it has room, by compare
//     and swap. What is refused is at no moment in the container's account, which gpufenced reads at any (but where in the
//     middle of it `files` gets full, or another container has the file).
//   - `charged` has what is in `used` before it is there, and `ended` only what the driver has answered or what was
//     refused. So `charged` of now less `ended` of before is all that may have come since, however long it was held up.
//   - What cannot be read or understood on a path that gives memory is refused.
//   - A task that is in no managed cgroup pays lookups and nothing else: of an array, where its cgroup has been found to be in
//     none since policies changed.
//   - What a task is known to be in holds for one cgroup and one generation of policies. Whoever changes policies begins
//     the next one after that, so from then on nobody is judged by what was before.
//
// Field offsets of the kernel's structures are relocated when the program is loaded, so only the fields that
// are used are declared. Offsets in the driver's requests are the same from 525 to 595; see abi.go.

#define __TARGET_ARCH_x86 1

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u64 size_t_;

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};
#define BPF_ANY 0
#define BPF_NOEXIST 1
#define BPF_F_NO_PREALLOC 1
#define BPF_LOCAL_STORAGE_GET_F_CREATE 1
#define BPF_RB_NO_WAKEUP 1

#define KERNEL __attribute__((preserve_access_index))
struct inode { __u32 i_rdev; } KERNEL;
struct file { struct inode *f_inode; } KERNEL;
struct caps { __u32 word[2]; }; // only where it lies counts: what is in it has changed
struct cred { struct caps cap_effective; } KERNEL;
struct thread_info { __u32 status; } KERNEL;
struct task_struct { struct thread_info thread_info; const struct cred *cred; } KERNEL;
struct pt_regs { unsigned long cx, dx, si, di, ax, orig_ax; } KERNEL;

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

// As BPF_PROG and PT_REGS of libbpf's bpf_tracing.h, which wants the kernel's whole vmlinux.h.
#define ARG(n) (ctx[n])

char LICENSE[] SEC("license") = "GPL";

#define EPERM 1
#define EFAULT 14
#define EINVAL 22
#define ENOMEM 12

#define MAJORS 512 /* the kernel gives no device a greater one */
#define LEVELS 16 /* how deep a managed cgroup may lie; what lies below it may be deeper */
#define CHAIN 4	  /* how many managed cgroups may lie above one another */
#define SHELVES 16384 /* a power of 2 */
#define STRANGERS 1024 /* a power of 2 */
#define FILES 65536
// No container has more of them: one that opens what it can would else be a reason to refuse all others. So many processes
// can have no contexts on a node's GPUs: there is no room for them.
#define FILES_OF_ONE (FILES / 16)
#define CLIENTS_OF_FILE 8 /* that are remembered */
#define CLIENTS_OF_ONE (FILES / 16) /* of all files of a container */
#define SHELF 4

enum kind { KIND_CTL = 1, KIND_GPU, KIND_UVM, KIND_CLOSED, KIND_CANARY };
enum policy_flags { F_ENFORCE = 1, F_CANARY = 2, F_NO_CREDIT = 4, F_GPU = 8, F_UVM = 16 };
enum event_kind {
	EV_QUOTA = 1, EV_CLASS, EV_COMPAT, EV_OPEN, EV_MALFORMED, EV_UVM, EV_DUP, EV_FOREIGN, EV_RACE, EV_UNMANAGED, EV_FULL, EV_HEAP, EV_TAINTED,
};
enum door { DOOR_IOCTL = 1, DOOR_COMPAT, DOOR_OPEN, DOOR_MMAP, DOOR_COPY };
enum counter { GENERATION /* of policies, and of which cgroups are tainted */, SERIALS = 8 /* on another cache line: all calls read the first */, COUNTERS };
enum stat { S_EVENTS_LOST, S_COMMITS, S_ROLLBACKS, S_COUNT };

struct policy {
	__u64 limit;
	__u64 uvm_limit;
	__u64 minors[4]; // granted GPUs, by minor number
	__u32 flags;
	__u32 pad;
};

struct usage {
	__u64 used;	   // charged now
	__u64 charged;	   // sum of all charges, and of those that are being weighed
	__u64 ended;	   // sum of those of which nothing more comes
	__u64 credited;	   // sum of all that frees took off, provisionally or not
	__u64 peak;	   // greatest `used` since it was last read
	__u64 denied, denied_bytes, races, uvm;
	__u64 event_second, event_count;
	__u64 born;    // another one's for every account of the same cgroup
	__u64 files;   // of `files`, those that are this container's
	__u64 clients; // what those claim of `clients`
};

struct settings {
	__u32 params_bytes; // of NV_MEMORY_ALLOCATION_PARAMS: 120, 128; 0: either
	__u32 commits;	    // the driver's copies are watched: what was not copied out was not given
	__u32 credit_frees; // a free lowers the charge at once
	__u32 kill_races;
	__u32 close_heap; // refuse the heap's own allocation calls, of which no kernel copy can be seen
	__u32 close_dup;  // refuse duplicates of another container's objects
	__u32 unmanaged;  // 1: who is neither managed nor exempt opens no GPU
	__u32 events_per_second;
};

struct event {
	__u64 ns, cgroup, size, used, limit;
	__u32 tgid, tid, kind, class, door, error;
	char comm[16];
};

struct chain { __u64 id[CHAIN]; __u32 n; __u32 flags; }; // the innermost last, whose flags these are; of a file's owner RACED or 0
#define RACED 0x80000000u   /* a request through this file was changed after the door */
#define TAINTED 0x40000000u /* such a file is open in this cgroup */
// What a file holds of an account: of the one that was born then. A cgroup's account may end before its files are closed, and
// the next one has nothing of theirs.
struct share { __u64 cgroup, born, bytes; };
// Whose a file is, the container first, then what is above it. serial: of all files that ever were, only this one's, since
// its accounts were born; its address comes again. clients: that the driver has found to be this file's.
struct owner { struct share shares[CHAIN]; __u64 uvm, serial, file; __u32 flags, clients[CLIENTS_OF_FILE], pad; };
// A client that containers are known to have made. of: the container, 0 where several say so: one of them has changed a
// request after the door. claims: of so many open files.
struct client { __u64 of, claims; };
// When the accounts of a chain were born, the container's first.
struct births { __u64 of[CHAIN]; };
// What was charged for what a program calls `what`: its client, and its handle. serial: of the file's owner; 0: none; BUSY:
// who has put that there reads or writes the rest.
struct object { __u64 serial, file, what, size; };
#define BUSY 1
struct shelf { struct object objects[SHELF]; };
struct inflight {
	struct chain chain;
	__u64 file, charged, pending, to, serial, born; // of the file's owner, and of the container's account
	__u32 client, handle, nr, class, active, verified, n, pad;
};
struct place { struct chain chain; __u64 cgroup, generation; }; // the managed cgroups above `cgroup`
struct task { struct place place; struct inflight request; };
// What gpufenced asks the programs to do to `usages`.
// Where frees were credited beyond `credited` since gpufenced has read that, it does nothing if `unless_credited`.
// With `begin` policies have changed: the next generation begins.
struct adjust { __u64 cgroup; __s64 bytes; __u64 used, charged, ended, credited, peak; __u32 found, reset_peak, unless_credited, done, begin, pad; };

#define MAP(name, kind, n, k, v)                                                                                                        \
	struct { __uint(type, kind); __uint(max_entries, n); __type(key, k); __type(value, v); } name SEC(".maps")
MAP(policies, BPF_MAP_TYPE_HASH, 8192, __u64, struct policy);
MAP(usages, BPF_MAP_TYPE_HASH, 8192, __u64, struct usage);
MAP(devices, BPF_MAP_TYPE_HASH, 2048, __u32, __u32);
MAP(majors, BPF_MAP_TYPE_ARRAY, MAJORS, __u32, __u32); // 1 where a device of that major number is or was guarded
MAP(strangers, BPF_MAP_TYPE_ARRAY, STRANGERS, __u32, __u64); // cgroups that are in no managed one; see stranger()
MAP(exempt, BPF_MAP_TYPE_HASH, 1024, __u64, __u32);
MAP(files, BPF_MAP_TYPE_HASH, FILES, __u64, struct owner);
MAP(objects, BPF_MAP_TYPE_ARRAY, SHELVES, __u32, struct shelf);
MAP(clients, BPF_MAP_TYPE_HASH, FILES, __u32, struct client);
MAP(adjusted, BPF_MAP_TYPE_HASH, 8192, __u64, __s64); // sum of what gpufenced has added to a cgroup's `used`; see close_account()
MAP(tainted, BPF_MAP_TYPE_HASH, 8192, __u64, __u64); // how many open files of a cgroup are RACED; see taint()
MAP(configuration, BPF_MAP_TYPE_ARRAY, 1, __u32, struct settings);
MAP(counters, BPF_MAP_TYPE_ARRAY, COUNTERS, __u32, __u64);
MAP(stats, BPF_MAP_TYPE_PERCPU_ARRAY, S_COUNT, __u32, __u64);
struct { __uint(type, BPF_MAP_TYPE_TASK_STORAGE); __uint(map_flags, BPF_F_NO_PREALLOC); __type(key, int); __type(value, struct task); } tasks SEC(".maps");
struct { __uint(type, BPF_MAP_TYPE_RINGBUF); __uint(max_entries, 1 << 18); } events SEC(".maps");

static const struct settings no_settings;
// So that their names reach the generated Go.
const enum kind *unused_kind __attribute__((unused));
const enum event_kind *unused_event_kind __attribute__((unused));
const enum door *unused_door __attribute__((unused));
const enum policy_flags *unused_policy_flags __attribute__((unused));
const struct event *unused_event __attribute__((unused));
const enum stat *unused_stat __attribute__((unused));
const enum counter *unused_counter __attribute__((unused));

static __always_inline const struct settings *conf(void)
{
	__u32 zero = 0;
	const struct settings *s = bpf_map_lookup_elem(&configuration, &zero);
	return s ? s : &no_settings;
}

static __always_inline void count(__u32 which)
{
	__u64 *v = bpf_map_lookup_elem(&stats, &which);
	if (v)
		(*v)++;
}

// From 6.12 on the verifier wants to see that an LSM program gives 0 or an errno.
static __always_inline int verdict(int r)
{
	asm volatile("" : "+r"(r));
	if (r >= 0)
		return 0;
	if (r < -4095)
		return -EPERM;
	return r;
}

// All managed cgroups above the current task, itself included, and the last one that was looked at.
static __always_inline int find(struct chain *c, __u64 *last)
{
	*last = 0;
	*c = (struct chain){};
	for (int level = 1; level < LEVELS; level++) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			break;
		*last = id;
		struct policy *p = bpf_map_lookup_elem(&policies, &id);
		if (!p)
			continue;
		if (c->n >= CHAIN)
			return -EPERM;
		c->id[c->n & (CHAIN - 1)] = id;
		c->n++;
		c->flags = p->flags;
	}
	return c->n;
}

static __always_inline __u64 leaf(const struct chain *c) { return c->n ? c->id[(c->n - 1) & (CHAIN - 1)] : 0; }

// Tells gpufenced of a refusal; the first ones of a second only.
static __always_inline void tell(__u32 kind, __u32 door, __u64 cgroup, __u64 size, __u64 limit, __u32 class, int error)
{
	const struct settings *s = conf();
	struct usage *u = bpf_map_lookup_elem(&usages, &cgroup);
	__u64 now = bpf_ktime_get_ns(), flags = 0;

	if (u) {
		__u64 second = now / 1000000000;
		if (u->event_second != second) {
			u->event_second = second;
			u->event_count = 0;
		}
		__u64 nth = __sync_fetch_and_add(&u->event_count, 1);
		if (nth >= s->events_per_second && kind != EV_RACE) {
			count(S_EVENTS_LOST);
			return;
		}
		if (nth)
			flags = BPF_RB_NO_WAKEUP; // the first has woken the reader, who drains
	}
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);
	if (!e) {
		count(S_EVENTS_LOST);
		return;
	}
	__u64 id = bpf_get_current_pid_tgid();
	e->ns = now;
	e->cgroup = cgroup;
	e->size = size;
	e->used = u ? u->used : 0;
	e->limit = limit;
	e->tgid = id >> 32;
	e->tid = (__u32)id;
	e->kind = kind;
	e->class = class;
	e->door = door;
	e->error = error < 0 ? -error : error;
	bpf_get_current_comm(e->comm, sizeof(e->comm));
	bpf_ringbuf_submit(e, flags);
}

// Which of a chain a level is, counted from the container.
static __always_inline __u32 above(const struct chain *c, __u32 level) { return (c->n - 1 - level) & (CHAIN - 1); }

// Takes so much off a sum, or what there is of it.
// Not static, as all that follow without it: so the verifier looks at it once.
__attribute__((noinline)) __u64 take_off(__u64 *sum, __u64 size)
{
	if (!sum)
		return 0;
	for (int try = 0; try < 8; try++) {
		__u64 was = *(volatile __u64 *)sum, part = was < size ? was : size;
		if (!part || __sync_val_compare_and_swap(sum, was, was - part) == was)
			return part;
	}
	__u64 was = __sync_fetch_and_sub(sum, size); // others come before it again and again
	if (was >= size)
		return size;
	__sync_fetch_and_add(sum, size - was);
	return was;
}

// The account of a cgroup, if it is still that one.
static __always_inline struct usage *account(__u64 id, __u64 born)
{
	struct usage *u = bpf_map_lookup_elem(&usages, &id);
	return u && u->born == born ? u : 0;
}

// Takes what a file holds, or was to hold, off an account.
__attribute__((noinline)) int discharge(__u64 id, __u64 born, __u64 size)
{
	struct usage *u = account(id, born);
	if (!u)
		return 0;
	__sync_fetch_and_add(&u->credited, size); // first: see adjust_usage()
	take_off(&u->used, size);
	return 0;
}

// What a file holds goes off its accounts.
static __always_inline void uncharge(struct owner *o, __u64 size)
{
	for (__u32 i = 0; i < CHAIN; i++) {
		struct share *s = &o->shares[i];
		if (!s->cgroup)
			break;
		discharge(s->cgroup, s->born, take_off(&s->bytes, size));
	}
}

// Of a charge nothing more comes. The container's account alone is compared with NVML.
static __always_inline void end_charge(__u64 id, __u64 born, __u64 size)
{
	struct usage *u = size ? account(id, born) : 0;
	if (u)
		__sync_fetch_and_add(&u->ended, size);
}

static __always_inline void raise_peak(struct usage *u, __u64 now)
{
	for (int try = 0; try < 8; try++) { // more that rise at once than that come past each other do not matter
		__u64 was = u->peak;
		if (now <= was || __sync_val_compare_and_swap(&u->peak, was, now) == was)
			return;
	}
}

// What of a policy an account would be over with so much, or 0. Managed ranges count as if all of their pages were on
// the device.
static __always_inline __u32 over_what(const struct policy *p, __u64 now, __u64 size, __u64 ranges)
{
	if (now > p->limit || now < size)
		return EV_QUOTA;
	return ranges && (now + ranges > p->uvm_limit || now + ranges < now) ? EV_UVM : 0;
}

static __always_inline int refuses(const struct policy *p, __u32 over) { return over && p->flags & F_ENFORCE && (over == EV_QUOTA || p->flags & F_UVM); }

// Adds to `used` what the policy does not refuse, and says what it is over with it.
static __always_inline __u32 fit(struct usage *u, const struct policy *p, __u64 size, __u64 *now)
{
	__u32 over = 0;
	for (int try = 0; try < 8; try++) {
		__u64 was = *(volatile __u64 *)&u->used;
		*now = was + size;
		over = over_what(p, *now, size, *(volatile __u64 *)&u->uvm);
		if (refuses(p, over)) {
			*now = 0; // it never was in `used`
			return over;
		}
		if (__sync_val_compare_and_swap(&u->used, was, *now) == was)
			goto added;
	}
	// It fits, and others come before it again and again: added first, weighed then.
	*now = __sync_fetch_and_add(&u->used, size) + size;
added:
	// Who maps a range adds to `uvm` first and reads `used` then, so of the two one at least sees the other.
	over = over_what(p, *now, size, *(volatile __u64 *)&u->uvm);
	if (refuses(p, over))
		__sync_fetch_and_sub(&u->used, size);
	return over;
}

// Takes a charge off the outer ones of a chain again, so many of them.
static __always_inline void discharge_all(const struct chain *c, const struct births *b, __u32 done, __u64 size)
{
	for (__u32 i = 0; i < CHAIN; i++) {
		if (i >= done)
			break;
		discharge(c->id[i], b->of[above(c, i)], size);
	}
}

// Charges all of a chain or none, and says which accounts.
enum charging { FORCE = 1 /* the driver has given it already */, ENDS = 2 /* nothing more comes of it */ };
__attribute__((noinline)) int charge(const struct chain *c, struct births *b, __u64 size, __u32 how, __u32 class)
{
	if (!c || !b)
		return -ENOMEM;
	int force = how & FORCE, ends = how & ENDS;
	int rc = 0;
	__u32 done = 0, kind = EV_QUOTA;
	__u64 over = 0, limit = 0;

	for (__u32 i = 0; i < CHAIN; i++) {
		if (i >= c->n)
			break;
		__u64 id = c->id[i], now;
		struct usage *u = bpf_map_lookup_elem(&usages, &id);
		struct policy *p = bpf_map_lookup_elem(&policies, &id);
		if (!u || !p) {
			if (force)
				continue;
			rc = -ENOMEM; // it is being taken away: nothing more is given
			break;
		}
		b->of[above(c, i)] = u->born;
		__sync_fetch_and_add(&u->charged, size);
		if (force) {
			now = __sync_fetch_and_add(&u->used, size) + size;
		} else {
			__u32 what = fit(u, p, size, &now);
			if (what) {
				__sync_fetch_and_add(&u->denied, 1);
				__sync_fetch_and_add(&u->denied_bytes, size);
				over = id;
				kind = what;
				limit = what == EV_QUOTA ? p->limit : p->uvm_limit;
				if (refuses(p, what)) {
					if (now)
						__sync_fetch_and_add(&u->ended, size);
					else
						__sync_fetch_and_sub(&u->charged, size);
					rc = -ENOMEM;
					break;
				}
			}
		}
		done = i + 1;
		raise_peak(u, now);
		if (ends && done == c->n) // the container's own, so none above it refuses
			__sync_fetch_and_add(&u->ended, size);
	}
	if (over)
		tell(kind, DOOR_IOCTL, over, size, limit, class, ENOMEM);
	if (!rc)
		return 0;
	discharge_all(c, b, done, size); // the outer ones come first, so it is never the container's own
	return rc;
}

// As the driver rounds: 2 MiB pages from 2 MiB on, 64 KiB below. No request wraps.
static __always_inline __u64 rounded(__u64 size)
{
	if (size > 1ull << 60)
		return 1ull << 60;
	if (size >= 2 << 20)
		return (size + (2 << 20) - 1) & ~((2ull << 20) - 1);
	return (size + (64 << 10) - 1) & ~((64ull << 10) - 1);
}

struct request { __u64 size; __u32 nr, class, client, handle, other, kind; };
struct params { __u32 owner, type, flags, w, h, pitch, attr, attr2, format, rest[7]; __u64 size; };
_Static_assert(sizeof(struct params) == 72 && __builtin_offsetof(struct params, size) == 64 && __builtin_offsetof(struct params, attr) == 24, "NV_MEMORY_ALLOCATION_PARAMS");

#define LOCATION(attr) (((attr) >> 25) & 3)
#define VIRTUAL 0x80000
static __always_inline int is_device_memory(const struct params *p) { return !(p->flags & VIRTUAL) && LOCATION(p->attr) == 0; }

static __always_inline int get(int sleeps, void *to, __u32 n, __u64 from)
{
	return (sleeps ? bpf_copy_from_user(to, n, (void *)from) : bpf_probe_read_user(to, n, (void *)from)) ? -EFAULT : 0;
}

static __always_inline int is_admin(void)
{
	struct task_struct *t = bpf_get_current_task_btf();
	__u32 low = 0; // CAP_SYS_ADMIN is 21, in the low word of either layout that kernels had
	const void *caps = __builtin_preserve_access_index(&t->cred->cap_effective);
	if (bpf_probe_read_kernel(&low, sizeof(low), caps))
		return 1;
	return low >> 21 & 1;
}

// What a request asks for. 0: pass on, with r->size to be charged; else the errno, with r->kind.
static __always_inline int decode(int sleeps, __u32 cmd, __u64 arg, struct request *r)
{
	__u32 nr = cmd & 0xff, size = cmd >> 16 & 0x3fff;

	r->kind = EV_MALFORMED;
	if (nr == 0xd3) { // NV_ESC_IOCTL_XFER_CMD: the request lies elsewhere; the driver follows once
		struct { __u32 cmd, size; __u64 at; } x;
		if (size != sizeof(x))
			return -EINVAL;
		if (get(sleeps, &x, sizeof(x), arg))
			return -EFAULT;
		nr = x.cmd;
		size = x.size;
		arg = x.at;
	}
	r->nr = nr;
	switch (nr) {
	case 0x2b: { // NV_ESC_RM_ALLOC: NVOS21 or NVOS64
		struct { __u32 root, parent, handle, class; __u64 params; } a;
		struct params p;
		if (size != 32 && size != 40 && size != 48)
			return -EINVAL;
		if (get(sleeps, &a, sizeof(a), arg))
			return -EFAULT;
		r->class = a.class;
		r->client = a.root;
		r->handle = a.handle;
		if (a.class == 0xc2 || (a.class >= 0x81 && a.class <= 0x83)) { // windows on memory that is somebody else's
			r->kind = EV_CLASS;
			return -EPERM;
		}
		if (a.class != 0x40 && a.class != 0x90ce && a.class != 0x3e && a.class != 0x50a0)
			return 0;
		// The class alone decides nothing: another thread can change it. What looks like device memory is charged. Of these
		// two the size is enough, and a short copy is cheaper by much.
		if (a.class == 0x40 || a.class == 0x90ce) {
			if (get(sleeps, &p.size, sizeof(p.size), a.params + __builtin_offsetof(struct params, size)))
				return -EFAULT;
			r->size = rounded(p.size);
			return 0;
		}
		if (get(sleeps, &p, sizeof(p), a.params))
			return -EFAULT;
		if (is_device_memory(&p))
			r->size = rounded(p.size);
		return 0;
	}
	case 0x4a: { // NV_ESC_RM_VID_HEAP_CONTROL: NVOS32
		struct { __u32 root, parent, fn, rest1[8], memory, type, flags, w56, w60, w64, rest2[3], w80[2], w88[2]; } a;
		_Static_assert(__builtin_offsetof(typeof(a), memory) == 44 && __builtin_offsetof(typeof(a), w56) == 56 && __builtin_offsetof(typeof(a), w80) == 80 && sizeof(a) == 96, "NVOS32");
		__u32 attr;
		__u64 bytes;
		if (size != 184)
			return -EINVAL;
		if (get(sleeps, &a, sizeof(a), arg))
			return -EFAULT;
		r->client = a.root;
		r->handle = a.memory;
		if (a.fn == 2) {
			attr = a.w56;
			bytes = a.w88[0] | (__u64)a.w88[1] << 32;
		} else if (a.fn == 14) {
			attr = a.w56;
			bytes = a.w80[0] | (__u64)a.w80[1] << 32;
		} else if (a.fn == 6) {
			attr = a.w64;
			bytes = (__u64)a.w56 * a.w60;
		} else {
			if (a.fn == 3 || a.fn == 20)
				r->nr = 0x29;
			return 0;
		}
		if (a.flags & VIRTUAL || (LOCATION(attr) != 0 && LOCATION(attr) != 3)) {
			// At strict another thread could change it: of these there is no copy to look at again.
			if (!conf()->close_heap)
				return 0;
		}
		if (conf()->close_heap) {
			r->kind = EV_HEAP;
			return -EPERM;
		}
		r->class = 0x40;
		r->size = rounded(bytes);
		return 0;
	}
	case 0x27: { // NV_ESC_RM_ALLOC_MEMORY: host memory, and for administrators windows on the device's
		struct { __u32 root, parent, handle, class; } a;
		if (size != 56 && size != 48)
			return -EINVAL;
		if (get(sleeps, &a, sizeof(a), arg))
			return -EFAULT;
		r->class = a.class;
		// The class could be changed by another thread, so at strict an administrator's is refused by the call.
		if (is_admin() && (conf()->close_heap || a.class == 0x40 || a.class == 0xc2 || (a.class >= 0x81 && a.class <= 0x83))) {
			r->kind = EV_CLASS;
			return -EPERM;
		}
		return 0;
	}
	case 0x29: { // NV_ESC_RM_FREE: NVOS00
		struct { __u32 root, parent, handle, status; } a;
		if (size != sizeof(a))
			return -EINVAL;
		if (get(sleeps, &a, sizeof(a), arg))
			return -EFAULT;
		r->client = a.root;
		r->handle = a.handle;
		return 0;
	}
	case 0x34: { // NV_ESC_RM_DUP_OBJECT: NVOS55
		struct { __u32 client, parent, object, source; } a;
		if (size != 28)
			return -EINVAL;
		if (get(sleeps, &a, sizeof(a), arg))
			return -EFAULT;
		r->client = a.client;
		r->other = a.source;
		return 0;
	}
	}
	return 0;
}

static __always_inline __u64 *counter(__u32 which) { return bpf_map_lookup_elem(&counters, &which); }

// Word `strangers` has of a cgroup that was found to be in no managed one in some generation. It is one word, so nobody
// sees half of it. The multiples of 2^64 by the golden ratio lie as far apart as can be: no two pairs have the same word whose
// ids are below 2^38 and whose generations are less than 2^24 apart. bpf/strangers_test.go tries all of them.
#define GOLDEN 0x9e3779b97f4a7c15ull
#define WORDED (1ull << 38) /* a cgroup's id is its inode's number, 32 bits, and above them how often these were all used */
static __always_inline __u64 stranger(__u64 cgroup, __u64 generation) { return cgroup + generation * GOLDEN; }

// What tasks know of where they are, and `strangers` of cgroups, does not hold any more.
static __always_inline void begin_generation(void)
{
	__u64 *g = counter(GENERATION);
	if (!g)
		return;
	// Each slot is emptied once in so many generations, so no word in it is older.
	__u32 slot = (__sync_fetch_and_add(g, 1) + 1) & (STRANGERS - 1);
	__u64 *s = bpf_map_lookup_elem(&strangers, &slot);
	if (s)
		*(volatile __u64 *)s = 0;
}

static __always_inline __u64 new_serial(void)
{
	__u64 *serials = counter(SERIALS);
	return serials ? __sync_fetch_and_add(serials, 1) + BUSY + 1 : 0;
}

// Whether a container may have one more file.
static __always_inline int has_room(__u64 id)
{
	struct usage *u = bpf_map_lookup_elem(&usages, &id);
	return !u || *(volatile __u64 *)&u->files < FILES_OF_ONE; // who has no account is given nothing at all
}

// The file that a charge belongs to goes with it when it closes. What a request is made through stays open meanwhile, so
// its owner stays where it is. It is made after the charge: of what is refused nothing stays.
__attribute__((noinline)) int own(const struct chain *c, const struct births *b, __u64 file)
{
	if (!c || !b)
		return 0;
	struct owner fresh = { .serial = new_serial(), .file = file };
	for (__u32 i = 0; i < CHAIN; i++) {
		if (i >= c->n)
			break;
		__u32 to = above(c, i);
		fresh.shares[to].cgroup = c->id[i];
		fresh.shares[to].born = b->of[to];
	}
	struct usage *u = account(leaf(c), b->of[0]);
	if (!u || !fresh.serial)
		return 0;
	if (!bpf_map_update_elem(&files, &file, &fresh, BPF_NOEXIST)) // else another thread's is as good
		__sync_fetch_and_add(&u->files, 1);
	return 0;
}

static __always_inline struct owner *owner(__u64 file) { return bpf_map_lookup_elem(&files, &file); }

static __always_inline struct owner *owned(const struct chain *c, const struct births *b, __u64 file)
{
	own(c, b, file);
	return owner(file);
}

static __always_inline int disowned(const struct chain *c, const struct owner *o)
{
	if (!o)
		return -ENOMEM;
	return o->shares[0].cgroup != leaf(c) ? -EPERM : 0;
}

// Whether a file holds something of another account than the one that there is now.
static __always_inline int renewed(const struct share *s, __u64 cgroup, __u64 born) { return s->cgroup != cgroup || s->born != born; }

// An account of a file's was made anew: what the file held of the one before is none of this one's, and frees of that are not
// known any more.
__attribute__((noinline)) int renew(__u64 file, __u32 level, __u64 cgroup, __u64 born)
{
	struct owner *o = owner(file);
	if (!o)
		return 0;
	struct share *s = &o->shares[level & (CHAIN - 1)];
	o->serial = new_serial();
	if (!level)
		o->uvm = 0;
	s->bytes = 0;
	s->cgroup = cgroup;
	s->born = born;
	return 0;
}

// What was charged goes when the file is closed.
static __always_inline void hold(struct owner *o, const struct chain *c, const struct births *b, __u64 size)
{
	for (__u32 i = 0; i < CHAIN; i++) {
		if (i >= c->n)
			break;
		__u32 to = above(c, i);
		struct share *s = &o->shares[to];
		if (renewed(s, c->id[i], b->of[to]))
			renew(o->file, to, c->id[i], b->of[to]);
		__sync_fetch_and_add(&s->bytes, size);
	}
}

// The driver has found a client to be a file's. What gives something through it is known so; the door has read its name,
// and another thread may have changed that since, so who says it is believed only where nobody else does.
__attribute__((noinline)) int claim(__u64 file, __u32 client)
{
	struct owner *o = owner(file);
	if (!client || !o)
		return 0;
	__u64 id = o->shares[0].cgroup;
	struct client first = { .of = id };
	struct usage *u = account(id, o->shares[0].born);

	if (!u)
		return 0;
	for (int i = 0; i < CLIENTS_OF_FILE; i++) {
		__u32 *mine = &o->clients[i], has = *(volatile __u32 *)mine;
		if (has == client)
			return 0;
		if (has)
			continue;
		if (*(volatile __u64 *)&u->clients >= CLIENTS_OF_ONE)
			return 0;
		int made = !bpf_map_update_elem(&clients, &client, &first, BPF_NOEXIST);
		struct client *k = bpf_map_lookup_elem(&clients, &client);
		if (!k)
			return 0;
		if (__sync_val_compare_and_swap(mine, 0, client)) { // another thread's, which asks for more than one at once
			if (made)
				bpf_map_delete_elem(&clients, &client);
			return 0;
		}
		__sync_fetch_and_add(&u->clients, 1);
		__sync_fetch_and_add(&k->claims, 1);
		if (k->of != id)
			k->of = 0;
		return 0;
	}
	return 0;
}

static __always_inline __u64 what(__u32 client, __u32 handle) { return (__u64)client << 32 | handle; }

// Handles that follow one another lie on shelves that do.
static __always_inline struct shelf *shelf(__u64 serial, __u64 what)
{
	__u32 client = what >> 32, handle = (__u32)what, i = (serial ^ (__u64)client << 24) * 0x9e3779b97f4a7c15ull >> 32;
	i = (i + (handle ^ handle >> 15)) & (SHELVES - 1);
	return bpf_map_lookup_elem(&objects, &i);
}

static __always_inline int take_slot(struct object *o, __u64 serial) { return __sync_val_compare_and_swap(&o->serial, serial, BUSY) == serial; }

static __always_inline void leave_slot(struct object *o, __u64 serial)
{
	asm volatile("" ::: "memory"); // x86 stores in order
	*(volatile __u64 *)&o->serial = serial;
}

static __always_inline int is_open(__u64 file, __u64 serial)
{
	struct owner *o = bpf_map_lookup_elem(&files, &file);
	return o && o->serial == serial;
}

// Remembers what was charged for an object, in the place of what its handle stood for before, or of what was got through a
// file that is closed. Where a shelf is full of others, it is not known: its free gives nothing back at once.
__attribute__((noinline)) int remember(__u64 serial, __u64 file, __u64 what, __u64 size)
{
	struct shelf *s = shelf(serial, what);
	if (!s)
		return 0;
	for (int i = 0; i < SHELF; i++) {
		struct object *o = &s->objects[i];
		if (o->serial != serial || o->what != what || !take_slot(o, serial))
			continue;
		int same = o->what == what; // else another thread has put another there
		if (same)
			o->size = size;
		leave_slot(o, serial);
		if (same)
			return 1;
	}
	for (int i = 0; i < SHELF; i++) {
		struct object *o = &s->objects[i];
		__u64 was = *(volatile __u64 *)&o->serial;
		if (was == BUSY || (was && is_open(o->file, was)) || !take_slot(o, was))
			continue;
		o->file = file;
		o->what = what;
		o->size = size;
		leave_slot(o, serial);
		return 1;
	}
	return 0;
}

// What was charged for an object, once.
__attribute__((noinline)) __u64 forget(__u64 serial, __u64 what)
{
	struct shelf *s = shelf(serial, what);
	if (!s)
		return 0;
	for (int i = 0; i < SHELF; i++) {
		struct object *o = &s->objects[i];
		if (o->serial != serial || o->what != what || !take_slot(o, serial))
			continue;
		int same = o->what == what;
		__u64 size = o->size;
		leave_slot(o, same ? 0 : serial);
		if (same)
			return size;
	}
	return 0;
}

// A free's credit, where the object is known and was charged to this container.
static __always_inline void credit(const struct chain *c, const struct request *r, __u64 file)
{
	struct owner *o = bpf_map_lookup_elem(&files, &file);

	if (!o || o->shares[0].cgroup != leaf(c) || !conf()->credit_frees || c->flags & F_NO_CREDIT)
		return;
	__u64 bytes = forget(o->serial, what(r->client, r->handle));
	if (bytes)
		uncharge(o, bytes);
}

// SIGKILL ends the process that changed a request, but what it got stays while another holds the same open file.
// Until that is closed nobody of the container reaches the driver, so nobody maps or uses it. Where the file is not known to
// be the container's, that is for good.
static __always_inline void taint(__u64 id, struct owner *o)
{
	if (o) {
		__u32 was = o->flags;
		if (was & RACED || __sync_val_compare_and_swap(&o->flags, was, was | RACED) != was)
			return;
	}
	__u64 none = 0;
	bpf_map_update_elem(&tainted, &id, &none, BPF_NOEXIST); // another file's is as good
	__u64 *n = bpf_map_lookup_elem(&tainted, &id);
	if (n)
		__sync_fetch_and_add(n, 1);
	begin_generation();
}

static __always_inline int is_tainted(__u64 id)
{
	__u64 *n = bpf_map_lookup_elem(&tainted, &id);
	return n && *n;
}

static __always_inline __u64 generation(void)
{
	__u64 *g = counter(GENERATION);
	return g ? *(volatile __u64 *)g : 0;
}

// The slot of a cgroup, 0 where its id makes no word.
static __always_inline __u64 *slot_of(__u64 cgroup)
{
	__u32 slot = cgroup & (STRANGERS - 1);
	return cgroup - 1 < WORDED - 1 ? bpf_map_lookup_elem(&strangers, &slot) : 0;
}

// As find, and what is known of the task, which is in cgroup `me`. The generation `now` is read before policies are, so what
// is kept of older ones is kept for an older one. The walk must have ended at the cgroup that the task was in before it: on
// its way from one to another a task can be seen in both, and that is not kept.
static __always_inline int locate(struct task *t, struct chain *c, __u64 me, __u64 now, __u64 *slot)
{
	__u64 last;

	if (t && t->place.cgroup == me && t->place.generation == now) {
		if (!t->place.chain.n)
			return 0;
		*c = t->place.chain;
		return c->n;
	}
	int rc = find(c, &last);
	if (rc > 0 && is_tainted(leaf(c)))
		c->flags |= TAINTED;
	if (rc == 0 && last == me && slot)
		*(volatile __u64 *)slot = stranger(me, now);
	if (rc >= 0 && t && last == me) {
		t->place.cgroup = 0;
		t->place.chain = *c;
		t->place.generation = now;
		t->place.cgroup = me;
	}
	return rc;
}

static __always_inline struct task *this_task(__u64 flags) { return bpf_task_storage_get(&tasks, bpf_get_current_task_btf(), 0, flags); }

// Most calls of a node are for other devices.
static __always_inline int may_guard(__u32 rdev)
{
	__u32 major = rdev >> 20, *guarded = bpf_map_lookup_elem(&majors, &major);
	return guarded && *guarded;
}

static __always_inline int weigh(int sleeps, int compat, __u64 f, __u32 rdev, __u32 cmd, __u64 arg)
{
	if (!may_guard(rdev))
		return 0;
	__u64 me = bpf_get_current_cgroup_id(), now = generation(), *slot = slot_of(me);
	if (slot && *(volatile __u64 *)slot == stranger(me, now))
		return 0;
	// Whoever is nobody's needs no storage, but where another cgroup has the slot.
	struct task *t = this_task(slot && !*(volatile __u64 *)slot ? 0 : BPF_LOCAL_STORAGE_GET_F_CREATE);
	struct chain c;
	int rc = locate(t, &c, me, now, slot);
	if (!rc)
		return 0;
	if (!t)
		t = this_task(BPF_LOCAL_STORAGE_GET_F_CREATE);
	__u32 *kind = bpf_map_lookup_elem(&devices, &rdev);
	if (!kind)
		return 0;
	if (rc < 0)
		return rc;
	__u32 k = *kind & 0xff;
	int enforce = c.flags & F_ENFORCE;
	if (enforce && c.flags & TAINTED) {
		tell(EV_TAINTED, compat ? DOOR_COMPAT : DOOR_IOCTL, leaf(&c), 0, 0, 0, EPERM);
		return -EPERM;
	}
	if ((k == KIND_CANARY) != !!(c.flags & F_CANARY) || k == KIND_UVM)
		return 0;
	if (compat) { // CUDA is 64-bit; this door cannot fault pages in, so it stays closed
		tell(EV_COMPAT, DOOR_COMPAT, leaf(&c), 0, 0, 0, EPERM);
		return enforce ? -EPERM : 0;
	}
	struct request r = {};
	rc = decode(sleeps, cmd, arg, &r);
	if (rc) {
		tell(r.kind, DOOR_IOCTL, leaf(&c), 0, 0, r.class, rc);
		return enforce ? rc : 0;
	}
	if (r.nr == 0x29) {
		credit(&c, &r, f);
		return 0;
	}
	if (r.nr == 0x34) {
		struct client *who = bpf_map_lookup_elem(&clients, &r.other);
		// Within one client it is this file's, or the driver refuses. Of one that is not known it may be anybody's.
		if (conf()->close_dup && r.client != r.other && (!who || who->of != leaf(&c))) {
			tell(EV_DUP, DOOR_IOCTL, leaf(&c), 0, 0, 0, EPERM);
			return enforce ? -EPERM : 0;
		}
		return 0;
	}
	if (r.nr != 0x2b && !r.size)
		return 0;
	// Also where nothing is charged: the class can be another by the time the driver reads it.
	struct inflight *p = t ? &t->request : 0;
	int watched = conf()->commits;
	if (!p && watched)
		return enforce ? -ENOMEM : 0; // before anything is charged, which nobody would take back
	if (p && p->pending) { // nobody saw the end of the last one; a task makes one at a time
		end_charge(leaf(&p->chain), p->born, p->pending);
		p->pending = 0;
	}
	struct births born = {};
	__u64 serial = 0;
	if (r.size) {
		struct owner *o = bpf_map_lookup_elem(&files, &f);
		rc = o ? disowned(&c, o) : has_room(leaf(&c)) ? 0 : -ENOMEM;
		if (!rc) {
			rc = charge(&c, &born, r.size, watched ? 0 : ENDS, r.class); // else nobody will see its end
			if (rc)
				return rc;
			if (!o)
				o = owned(&c, &born, f);
			rc = disowned(&c, o);
			if (rc) {
				discharge_all(&c, &born, c.n, r.size);
				end_charge(leaf(&c), born.of[0], watched ? r.size : 0);
			}
		}
		if (rc || !o) {
			tell(rc == -EPERM ? EV_FOREIGN : EV_FULL, DOOR_IOCTL, leaf(&c), r.size, 0, r.class, rc);
			return enforce ? rc : 0;
		}
		hold(o, &c, &born, r.size);
		serial = o->serial;
		// A handle that the driver chooses is not known: gpufenced's look at NVML lowers that charge. What had this handle
		// before has gone, with something above it, or was not given. Where copies are watched, it is known when it is given.
		if (r.handle && !(watched && r.nr == 0x2b))
			remember(serial, o->file, what(r.client, r.handle), r.size);
	}
	if (!p)
		return 0;
	p->chain = c;
	p->file = f;
	p->serial = serial;
	p->born = born.of[0];
	p->charged = r.size;
	p->pending = watched ? r.size : 0;
	p->client = r.client;
	p->handle = r.handle;
	p->nr = r.nr;
	p->class = r.class;
	p->verified = 0;
	p->active = 1;
	return 0;
}

static __always_inline int door(int sleeps, int compat, struct file *file, __u32 cmd, __u64 arg)
{
	return weigh(sleeps, compat, (__u64)file, file->f_inode->i_rdev, cmd, arg);
}

static __always_inline int open_door(struct file *file)
{
	__u32 rdev = file->f_inode->i_rdev;
	if (!may_guard(rdev))
		return 0;
	__u32 *kind = bpf_map_lookup_elem(&devices, &rdev);
	if (!kind)
		return 0;
	struct chain c;
	__u64 last;
	int rc = find(&c, &last);
	if (rc < 0)
		return rc;
	__u32 k = *kind & 0xff;
	if (k == KIND_CANARY)
		return 0;
	if (!rc) {
		if (!conf()->unmanaged)
			return 0;
		for (int level = 0; level < LEVELS; level++) {
			__u64 id = bpf_get_current_ancestor_cgroup_id(level);
			if (!id)
				break;
			if (bpf_map_lookup_elem(&exempt, &id))
				return 0;
		}
		__u64 me = bpf_get_current_cgroup_id();
		tell(EV_UNMANAGED, DOOR_OPEN, me, 0, 0, rdev, EPERM);
		return -EPERM;
	}
	// The innermost decides: what a pod was granted is the sum of its containers'.
	__u64 id = leaf(&c);
	struct policy *p = bpf_map_lookup_elem(&policies, &id);
	if (!p)
		return -EPERM;
	int open = 0;
	if (k == KIND_GPU) {
		__u32 minor = *kind >> 8 & 0xff;
		open = p->minors[minor >> 6 & 3] >> (minor & 63) & 1;
	} else if (k == KIND_CTL || k == KIND_UVM) {
		open = !!(p->flags & F_GPU);
	}
	if (open)
		return 0;
	tell(EV_OPEN, DOOR_OPEN, id, 0, 0, rdev, EPERM);
	return p->flags & F_ENFORCE ? -EPERM : 0;
}

static __always_inline int mmap_door(struct file *file)
{
	if (!file)
		return 0;
	__u32 rdev = file->f_inode->i_rdev;
	if (!may_guard(rdev))
		return 0;
	__u32 *kind = bpf_map_lookup_elem(&devices, &rdev);
	if (!kind || (*kind & 0xff) != KIND_UVM)
		return 0;
	struct chain c;
	__u64 last;
	int rc = find(&c, &last);
	if (rc <= 0)
		return rc;
	struct task_struct *t = bpf_get_current_task_btf();
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(t);
	__u64 id = leaf(&c), bytes = BPF_CORE_READ(regs, si);
	struct policy *p = bpf_map_lookup_elem(&policies, &id);
	struct usage *u = bpf_map_lookup_elem(&usages, &id);
	if (!p || !u)
		return -EPERM;
	int enforce = p->flags & F_ENFORCE && p->flags & F_UVM;
	if (t->thread_info.status & 2 /* TS_COMPAT */) { // its length is in another register
		tell(EV_COMPAT, DOOR_MMAP, id, 0, 0, 0, EPERM);
		return enforce ? -EPERM : 0;
	}
	__u64 f = (__u64)file, now = __sync_fetch_and_add(&u->uvm, bytes) + bytes, all = now + *(volatile __u64 *)&u->used;
	struct owner *o = bpf_map_lookup_elem(&files, &f);
	rc = o ? disowned(&c, o) : has_room(id) ? 0 : -ENOMEM;
	int over = all > p->uvm_limit || now < bytes || all < now, full = rc == -ENOMEM;
	if (!rc && !o && !(over && enforce)) {
		struct births born = { .of = { u->born } };
		o = owned(&c, &born, f);
		rc = disowned(&c, o);
		full = rc == -ENOMEM;
	}
	if (over || rc)
		tell(full ? EV_FULL : rc ? EV_FOREIGN : EV_UVM, DOOR_MMAP, id, bytes, p->uvm_limit, 0, rc ? rc : ENOMEM);
	if (rc || (over && enforce) || !o) {
		take_off(&u->uvm, bytes); // nothing would take it off later
		return !enforce ? 0 : rc ? rc : -ENOMEM;
	}
	if (renewed(&o->shares[0], id, u->born))
		renew(f, 0, id, u->born);
	__sync_fetch_and_add(&o->uvm, bytes);
	return 0;
}

// gpufenced's hand on `usages`: adds to it and reads it in one go.
SEC("syscall")
int adjust_usage(struct adjust *a)
{
	__u64 id = a->cgroup;
	if (a->begin)
		begin_generation();
	struct usage *u = bpf_map_lookup_elem(&usages, &id);
	if (!u)
		return 0;
	a->found = 1;
	a->done = 1;
	if (a->bytes) {
		__s64 none = 0;
		bpf_map_update_elem(&adjusted, &id, &none, BPF_NOEXIST); // it may be there
		__s64 *sum = bpf_map_lookup_elem(&adjusted, &id);
		if (!sum)
			return -ENOMEM;
		// First, so that a file that closes between the two takes too little off. One that began before has told in
		// `credited`: what it takes off may be the same memory.
		__sync_fetch_and_add(sum, a->bytes);
		if (a->unless_credited && *(volatile __u64 *)&u->credited != a->credited) {
			__sync_fetch_and_sub(sum, a->bytes);
			a->done = 0;
		} else {
			__sync_fetch_and_add(&u->used, (__u64)a->bytes);
		}
	}
	// In this order; see the top.
	a->used = *(volatile __u64 *)&u->used;
	a->charged = *(volatile __u64 *)&u->charged;
	a->credited = *(volatile __u64 *)&u->credited;
	a->ended = *(volatile __u64 *)&u->ended;
	a->peak = *(volatile __u64 *)&u->peak;
	if (a->reset_peak) {
		// What rises meanwhile is not lost.
		a->peak = __sync_lock_test_and_set(&u->peak, 0);
		raise_peak(u, *(volatile __u64 *)&u->used);
	}
	if (a->peak < a->used)
		a->peak = a->used;
	return 0;
}

#ifndef ELSEWHERE // tests/bench/gateload hangs the same code on a carrier that kernels take which refuse these
// The doors, as LSM programs, which may sleep for a page of the request, and as replacements of the hooks'
// return values for kernels where `bpf` is not among the security modules.
SEC("lsm.s/file_ioctl")
int lsm_ioctl(__u64 *ctx) { return verdict((int)ARG(3) ? (int)ARG(3) : door(1, 0, (struct file *)ARG(0), (__u32)ARG(1), ARG(2))); }
SEC("lsm/file_ioctl_compat")
int lsm_compat(__u64 *ctx) { return verdict((int)ARG(3) ? (int)ARG(3) : door(0, 1, (struct file *)ARG(0), (__u32)ARG(1), ARG(2))); }
SEC("lsm/file_open")
int lsm_open(__u64 *ctx) { return verdict((int)ARG(1) ? (int)ARG(1) : open_door((struct file *)ARG(0))); }
SEC("lsm/mmap_file")
int lsm_mmap(__u64 *ctx) { return verdict((int)ARG(4) ? (int)ARG(4) : mmap_door((struct file *)ARG(0))); }

SEC("fmod_ret/security_file_ioctl")
int mod_ioctl(__u64 *ctx) { return verdict((int)ARG(3) ? (int)ARG(3) : door(0, 0, (struct file *)ARG(0), (__u32)ARG(1), ARG(2))); }
SEC("fmod_ret/security_file_ioctl_compat")
int mod_compat(__u64 *ctx) { return verdict((int)ARG(3) ? (int)ARG(3) : door(0, 1, (struct file *)ARG(0), (__u32)ARG(1), ARG(2))); }
SEC("fmod_ret/security_file_open")
int mod_open(__u64 *ctx) { return verdict((int)ARG(1) ? (int)ARG(1) : open_door((struct file *)ARG(0))); }
SEC("fmod_ret/security_mmap_file")
int mod_mmap(__u64 *ctx) { return verdict((int)ARG(3) ? (int)ARG(3) : mmap_door((struct file *)ARG(0))); }

// Takes what was charged through a file off its accounts, less what gpufenced has taken off them before: it does so for
// memory that NVML does not show any more, and whose that was is not known. Taken off twice, an account would stand for
// less than the other files hold; not taken off, gpufenced does it within a settle.
__attribute__((noinline)) int close_account(__u64 id, __u64 born, __u64 bytes)
{
	struct usage *u = account(id, born);
	if (!u)
		return 0;
	__sync_fetch_and_add(&u->credited, bytes); // first: see adjust_usage()
	__s64 *a = bpf_map_lookup_elem(&adjusted, &id);
	for (int try = 0; a && try < 8; try++) {
		__s64 was = *(volatile __s64 *)a;
		if (was >= 0)
			break;
		__u64 before = -was, part = before < bytes ? before : bytes;
		if (__sync_val_compare_and_swap(a, was, was + (__s64)part) == was) {
			bytes -= part;
			break;
		}
		if (try == 7)
			bytes = 0; // many files close at once: gpufenced will see
	}
	take_off(&u->used, bytes);
	return 0;
}

// A file says no more whose a client is. With the last that does it is not known.
static __always_inline void unclaim(struct usage *u, __u32 client)
{
	struct client *k = bpf_map_lookup_elem(&clients, &client);
	if (u)
		take_off(&u->clients, 1);
	if (k && __sync_fetch_and_sub(&k->claims, 1) == 1)
		bpf_map_delete_elem(&clients, &client);
}

// The last reference to an open device is gone, and with it everything that was taken through it. This is
// the kernel's own word, so it is credit at every level.
SEC("fentry/security_file_free")
int file_gone(__u64 *ctx)
{
	__u64 f = ARG(0);
	struct owner *o = bpf_map_lookup_elem(&files, &f);
	if (!o)
		return 0;
	struct owner last = *o;
	bpf_map_delete_elem(&files, &f);
	__u64 id = last.shares[0].cgroup;
	struct usage *u = account(id, last.shares[0].born);
	for (int i = 0; i < CLIENTS_OF_FILE; i++) {
		if (!last.clients[i])
			break;
		unclaim(u, last.clients[i]);
	}
	for (__u32 i = 0; i < CHAIN; i++) {
		const struct share *s = &last.shares[i];
		if (s->bytes)
			close_account(s->cgroup, s->born, s->bytes);
	}
	if (!u)
		return 0;
	take_off(&u->files, 1);
	take_off(&u->uvm, last.uvm);
	__u64 *n = last.flags & RACED ? bpf_map_lookup_elem(&tainted, &id) : 0;
	if (n) {
		take_off(n, 1);
		begin_generation();
	}
	return 0;
}

static __always_inline struct inflight *flying(void)
{
	struct task *t = this_task(0);
	return t && t->request.active ? &t->request : 0;
}

static __always_inline int is_params(__u32 n)
{
	__u32 want = conf()->params_bytes;
	return want ? n == want : n == 120 || n == 128;
}

// The kernel's own copy, which no thread of the container can change any more. What it asks for beyond what
// was charged was changed after the door: nobody does that by accident.
static __always_inline void look(struct inflight *p, __u64 copy, __u32 n, int out)
{
	struct params k;
	if (bpf_probe_read_kernel(&k, sizeof(k), (void *)copy))
		return;
	__u64 size = is_device_memory(&k) ? rounded(k.size) : 0;
	if (size > p->charged) {
		__u64 more = size - p->charged, id = leaf(&p->chain);
		struct chain c = p->chain;
		struct births born = {};
		charge(&c, &born, more, FORCE, p->class);
		if (p->born != born.of[0])
			p->pending = 0; // of another account
		p->born = born.of[0];
		p->pending += more;
		__u64 f = p->file;
		struct owner *o = bpf_map_lookup_elem(&files, &f);
		if (!o && has_room(id))
			o = owned(&c, &born, f);
		if (disowned(&c, o))
			o = 0; // it is charged, and no file's
		if (o) {
			hold(o, &c, &born, more);
			p->serial = o->serial;
		}
		p->charged = size;
		// On the way out the driver has put what it gave, which may be more than was asked for.
		int proven = !(out && p->verified) && !(n == 120 && p->class == 0xb1);
		struct usage *u = bpf_map_lookup_elem(&usages, &id);
		if (proven) {
			if (u)
				__sync_fetch_and_add(&u->races, 1);
			tell(EV_RACE, DOOR_COPY, id, size, 0, p->class, 0);
			struct policy *pol = bpf_map_lookup_elem(&policies, &id);
			if (conf()->kill_races && pol && pol->flags & F_ENFORCE) {
				bpf_send_signal(9);
				taint(id, o);
			}
		}
	}
	p->verified = 1;
}

static __always_inline void when_born(const struct chain *c, struct births *b)
{
	for (__u32 i = 0; i < CHAIN; i++) {
		if (i >= c->n)
			break;
		__u64 id = c->id[i];
		struct usage *u = bpf_map_lookup_elem(&usages, &id);
		if (u)
			b->of[above(c, i)] = u->born;
	}
}

static __always_inline void copied_in(__u64 to, __u32 n)
{
	struct inflight *p = flying();
	if (p && is_params(n))
		look(p, to, n, 0);
}

// What makes a client is asked for by nobody: whatever name such a request has for who asks, the driver does not look at it.
static __always_inline int is_client(__u32 class) { return class <= 1 || class == 0x41; }

static __always_inline void copied_out(__u64 from, __u32 n)
{
	struct inflight *p = flying();
	if (!p)
		return;
	int params = is_params(n);
	if (params)
		look(p, from, n, 1);
	else if (p->nr != 0x2b)
		return;
	// It was given. The driver has found this client to be this file's.
	__u32 client = p->client;
	__u64 f = p->file;
	struct owner *o = bpf_map_lookup_elem(&files, &f);
	if (!o && has_room(leaf(&p->chain))) {
		struct chain c = p->chain;
		struct births born = {};
		when_born(&c, &born);
		o = owned(&c, &born, f);
	}
	if (o && o->shares[0].cgroup == leaf(&p->chain) && !is_client(p->class))
		claim(f, client);
	if (!params)
		return;
	if (o && p->handle && p->charged && p->nr == 0x2b && o->serial == p->serial)
		remember(o->serial, o->file, what(client, p->handle), p->charged);
	end_charge(leaf(&p->chain), p->born, p->pending);
	p->pending = 0;
	p->charged = 0;
	p->active = 0;
	count(S_COMMITS);
}

// The request has ended, and nothing was copied out: nothing was given.
static __always_inline void ended(void)
{
	struct inflight *p = flying();
	if (!p)
		return;
	p->active = 0;
	__u64 f = p->file, bytes = p->charged;
	if (conf()->commits && bytes && p->nr == 0x2b) {
		struct owner *o = bpf_map_lookup_elem(&files, &f);
		if (o && o->serial == p->serial) {
			uncharge(o, bytes);
			count(S_ROLLBACKS);
		}
	}
	end_charge(leaf(&p->chain), p->born, p->pending); // last: until then it is in `used`
	p->pending = 0;
}

SEC("fexit/os_memcpy_from_user")
int copy_in(__u64 *ctx) { copied_in(ARG(0), (__u32)ARG(2)); return 0; }
SEC("fentry/os_memcpy_to_user")
int copy_out(__u64 *ctx)
{
	__u64 from = 0; // a pointer to const void, which the verifier lets nobody take from ctx
	if (!bpf_get_func_arg(ctx, 1, &from))
		copied_out(from, (__u32)ARG(2));
	return 0;
}
SEC("fexit/nvidia_unlocked_ioctl")
int request_end(__u64 *ctx) { ended(); return 0; }

// The same for drivers whose module has no type information.
SEC("kprobe/os_memcpy_from_user")
int probe_copy_in(struct pt_regs *ctx)
{
	struct inflight *p = flying();
	if (p) {
		p->to = ctx->di;
		p->n = (__u32)ctx->dx;
	}
	return 0;
}
SEC("kretprobe/os_memcpy_from_user")
int probe_copied_in(struct pt_regs *ctx)
{
	struct inflight *p = flying();
	if (p && p->n) {
		__u64 to = p->to;
		__u32 n = p->n;
		p->n = 0;
		if (is_params(n))
			look(p, to, n, 0);
	}
	return 0;
}
SEC("kprobe/os_memcpy_to_user")
int probe_copy_out(struct pt_regs *ctx) { copied_out(ctx->si, (__u32)ctx->dx); return 0; }
SEC("kretprobe/nvidia_unlocked_ioctl")
int probe_request_end(struct pt_regs *ctx) { ended(); return 0; }

#endif
