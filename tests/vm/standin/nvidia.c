// SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0
/*
 * A stand-in for NVIDIA's driver, for guests of tests: its character devices, the request layouts that
 * decide about memory, and the points at which the real one's interface layer copies parameters into and out
 * of the kernel. It gives no memory, it counts. What it counts is what it took from its own copies, so it
 * tells the truth about what a race got through.
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#define MAJOR_NUMBER 195
#define NO_MEMORY 0x51 /* the driver's word for it; ioctl() itself gives 0 */
#define BAD_OBJECT 0x57

struct object { struct list_head l; u32 client, handle; u64 bytes; };
struct open_file { struct mutex lock; struct list_head objects; u64 bytes; };

/* What everything holds and held, for the tests. */
static atomic64_t held, peak, allocations, window;
/* What a request must exceed to count as one that should not have been let through. */
static ulong over = ~0UL;
module_param(over, ulong, 0644);
/* What the driver says that nvidia0 is. */
static char uuid[64];
module_param_string(uuid, uuid, sizeof(uuid), 0644);

int os_memcpy_from_user(void *to, const void *from, u32 n);
int os_memcpy_to_user(void *to, const void *from, u32 n);
long nvidia_unlocked_ioctl(struct file *file, unsigned int cmd, unsigned long arg);

noinline int os_memcpy_from_user(void *to, const void *from, u32 n)
{
	int rc = copy_from_user(to, (const void __user *)from, n) ? -EFAULT : 0;

	barrier();
	return rc;
}

noinline int os_memcpy_to_user(void *to, const void *from, u32 n)
{
	int rc = copy_to_user((void __user *)to, from, n) ? -EFAULT : 0;

	barrier();
	return rc;
}

static u32 add(struct open_file *f, u32 client, u32 handle, u64 bytes)
{
	struct object *o = kzalloc(sizeof(*o), GFP_KERNEL);
	u64 now, was;

	if (!o)
		return NO_MEMORY;
	o->client = client;
	o->handle = handle;
	o->bytes = bytes;
	mutex_lock(&f->lock);
	list_add(&o->l, &f->objects);
	f->bytes += bytes;
	mutex_unlock(&f->lock);
	now = atomic64_add_return(bytes, &held);
	atomic64_inc(&allocations);
	if (bytes > over)
		atomic64_inc(&window);
	for (was = atomic64_read(&peak); now > was;) {
		u64 seen = atomic64_cmpxchg(&peak, was, now);
		if (seen == was)
			break;
		was = seen;
	}
	return 0;
}

static u32 drop(struct open_file *f, u32 client, u32 handle)
{
	struct object *o, *next;
	u32 status = BAD_OBJECT;

	mutex_lock(&f->lock);
	list_for_each_entry_safe(o, next, &f->objects, l) {
		if (o->client != client || (o->handle != handle && handle != client))
			continue;
		f->bytes -= o->bytes;
		atomic64_sub(o->bytes, &held);
		list_del(&o->l);
		kfree(o);
		status = 0;
		if (handle != client)
			break;
	}
	mutex_unlock(&f->lock);
	return status;
}

#define AT(T, o) (*(T *)(b + (o)))

/* NVOS21 and NVOS64: parameters behind a pointer, copied in, and out again where it succeeded. */
static void rm_alloc(struct open_file *f, u8 *b, u32 size)
{
	u32 class = AT(u32, 12), psize = size == 32 ? AT(u32, 24) : AT(u32, size == 48 ? 32 : 32);
	void *user = (void *)AT(u64, 16);
	u8 *kernel;
	u32 status = 0;

	if (class == 0x40 || class == 0x3e || class == 0x50a0 || class == 0x90ce) {
		if (psize != 120)
			psize = 128;
		kernel = kzalloc(psize, GFP_KERNEL);
		if (!kernel || os_memcpy_from_user(kernel, user, psize)) {
			kfree(kernel);
			AT(u32, size == 32 ? 28 : 40) = BAD_OBJECT;
			return;
		}
		if (class == 0x40 || class == 0x90ce)
			status = add(f, AT(u32, 0), AT(u32, 8), *(u64 *)(kernel + 64));
		if (!status && os_memcpy_to_user(user, kernel, psize))
			status = BAD_OBJECT;
		kfree(kernel);
	} else if (class == 0x80 || class == 0x41) { /* a device; a client, which is asked for by nobody */
		u8 params[56];
		u32 n = class == 0x80 ? 56 : 4;

		if (os_memcpy_from_user(params, user, n) || os_memcpy_to_user(user, params, n))
			status = BAD_OBJECT;
	}
	AT(u32, size == 32 ? 28 : 40) = status;
}

static void vid_heap(struct open_file *f, u8 *b)
{
	u32 fn = AT(u32, 8);

	if (fn == 2)
		AT(u32, 20) = add(f, AT(u32, 0), AT(u32, 44), AT(u64, 88));
	else if (fn == 14)
		AT(u32, 20) = add(f, AT(u32, 0), AT(u32, 44), AT(u64, 80));
	else if (fn == 6)
		AT(u32, 20) = add(f, AT(u32, 0), AT(u32, 44), (u64)AT(u32, 56) * AT(u32, 60));
	else if (fn == 3)
		AT(u32, 20) = drop(f, AT(u32, 0), AT(u32, 44));
}

long nvidia_unlocked_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct open_file *f = file->private_data;
	u32 nr = cmd & 0xff, size = _IOC_SIZE(cmd);
	struct { u32 cmd, size; u64 ptr; } x;
	u8 *b;
	long rc = 0;

	if (nr == 0xd3) {
		if (size != sizeof(x) || copy_from_user(&x, (void __user *)arg, sizeof(x)))
			return -EINVAL;
		nr = x.cmd;
		size = x.size;
		arg = x.ptr;
	}
	if (size > 16384)
		return -EINVAL;
	b = kzalloc(size + 8, GFP_KERNEL);
	if (!b)
		return -ENOMEM;
	if (copy_from_user(b, (void __user *)arg, size)) {
		kfree(b);
		return -EFAULT;
	}
	switch (nr) {
	case 0x2b: if (size >= 32) rm_alloc(f, b, size); else rc = -EINVAL; break;
	case 0x4a: if (size == 184) vid_heap(f, b); else rc = -EINVAL; break;
	/* Of this parent nothing is freed: what a free is whose handle was changed after the gate has read it. */
	case 0x29: if (size == 16 && AT(u32, 4) == 0xdeaf) AT(u32, 12) = BAD_OBJECT; else if (size == 16) AT(u32, 12) = drop(f, AT(u32, 0), AT(u32, 8)); else rc = -EINVAL; break;
	case 0x2a: case 0x27: case 0x34: break; /* control, host memory, dup: nothing is counted */
	case 0xf0: /* ours: what this file holds, everything holds and held, how often, how often above the mark */
		if (size != 40) { rc = -EINVAL; break; }
		AT(u64, 0) = f->bytes;
		AT(u64, 8) = atomic64_read(&held);
		AT(u64, 16) = atomic64_read(&peak);
		AT(u64, 24) = atomic64_read(&allocations);
		AT(u64, 32) = atomic64_read(&window);
		break;
	case 0xf1: /* ours: begin counting anew */
		atomic64_set(&peak, atomic64_read(&held));
		atomic64_set(&allocations, 0);
		atomic64_set(&window, 0);
		break;
	default: rc = -EINVAL;
	}
	if (!rc && copy_to_user((void __user *)arg, b, size))
		rc = -EFAULT;
	kfree(b);
	return rc;
}

static int nvidia_open(struct inode *inode, struct file *file)
{
	struct open_file *f = kzalloc(sizeof(*f), GFP_KERNEL);

	if (!f)
		return -ENOMEM;
	mutex_init(&f->lock);
	INIT_LIST_HEAD(&f->objects);
	file->private_data = f;
	return 0;
}

static int nvidia_close(struct inode *inode, struct file *file)
{
	struct open_file *f = file->private_data;
	struct object *o, *next;

	list_for_each_entry_safe(o, next, &f->objects, l) {
		atomic64_sub(o->bytes, &held);
		kfree(o);
	}
	kfree(f);
	return 0;
}

/* As managed memory: a range without pages. */
static int nvidia_mmap(struct file *file, struct vm_area_struct *vma) { return 0; }

static const struct file_operations operations = {
	.owner = THIS_MODULE, .open = nvidia_open, .release = nvidia_close, .mmap = nvidia_mmap,
	.unlocked_ioctl = nvidia_unlocked_ioctl, .compat_ioctl = nvidia_unlocked_ioctl,
};

static int information(struct seq_file *m, void *v)
{
	seq_printf(m, "Model: \t\t stand-in\nGPU UUID: \t %.*s\nDevice Minor: \t 0\n", (int)strcspn(uuid, "\n"), uuid);
	return 0;
}

static struct proc_dir_entry *proc;
static struct class *class;
static int uvm_major;

static int __init standin_init(void)
{
	int rc = __register_chrdev(MAJOR_NUMBER, 0, 256, "nvidia", &operations);
	u32 i;
	static const struct { u32 minor; const char *name; } nodes[] = { { 0, "nvidia0" }, { 1, "nvidia1" }, { 254, "nvidia-modeset" }, { 255, "nvidiactl" } };

	if (rc < 0)
		return rc;
	uvm_major = __register_chrdev(0, 0, 2, "nvidia-uvm", &operations);
	if (uvm_major < 0)
		return uvm_major;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
	class = class_create("nvidia");
#else
	class = class_create(THIS_MODULE, "nvidia");
#endif
	if (IS_ERR(class))
		return PTR_ERR(class);
	for (i = 0; i < ARRAY_SIZE(nodes); i++)
		device_create(class, NULL, MKDEV(MAJOR_NUMBER, nodes[i].minor), NULL, nodes[i].name);
	device_create(class, NULL, MKDEV(uvm_major, 0), NULL, "nvidia-uvm");
	device_create(class, NULL, MKDEV(uvm_major, 1), NULL, "nvidia-uvm-tools");
	proc = proc_mkdir("driver/nvidia", NULL);
	if (proc)
		proc_create_single("information", 0444, proc_mkdir("0000:01:00.0", proc_mkdir("gpus", proc)), information);
	return 0;
}

static void __exit standin_exit(void)
{
	u32 i;

	proc_remove(proc);
	for (i = 0; i < 256; i++)
		device_destroy(class, MKDEV(MAJOR_NUMBER, i));
	device_destroy(class, MKDEV(uvm_major, 0));
	device_destroy(class, MKDEV(uvm_major, 1));
	class_destroy(class);
	__unregister_chrdev(uvm_major, 0, 2, "nvidia-uvm");
	__unregister_chrdev(MAJOR_NUMBER, 0, 256, "nvidia");
}

module_init(standin_init);
module_exit(standin_exit);
MODULE_LICENSE("Dual BSD/GPL"); /* the kernel knows no word for ours */
MODULE_DESCRIPTION("stand-in for NVIDIA's driver in tests: counts, gives nothing");
