// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/ledger"
	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/enforcer/registry"
)

// pagesLost is why a container's shim is not accounted after its pages could not be adopted.
const pagesLost = "pages lost"

// recover reads what an earlier gpufenced left: containers that run go on with the same id,
// process, limits, pages and counters.
func (d *Daemon) recover() error {
	reg, damaged, err := d.store.Load()
	if err != nil {
		return err
	}
	d.reg = reg
	d.damaged = len(damaged) > 0
	d.configure()
	for _, x := range damaged {
		where := "it stays where it is"
		if x.Aside != "" {
			where = "it is kept as " + x.Aside
		}
		d.event(api.Event{Type: "state-damaged", Code: string(quota.CodeStateDamaged),
			Message: fmt.Sprintf("%s cannot be used (%v): the containers of its pod are not fenced any more, %s; start them again", x.Path, x.Err, where)})
	}
	adopted := 0
	for _, c := range reg.Containers() {
		switch {
		case c.State == registry.Ended:
			c.Pages = false
			if c.Pod().BootID != d.bootID {
				c.Promised = nil // the kernel's accounts went with the boot
			}
			d.takePromisesBack(c) // else gpufenced ended between the two
		case c.Pod().BootID != d.bootID, c.State == registry.Running && d.endedMeanwhile(c):
			// To be removed with it; what is gone already is gone.
			if err := d.adoptPages(c); err != nil {
				d.log.WithField("container", c.Key.ID).WithError(err).Debug("an ended container's pages are not whole")
			}
			if c.Pod().BootID != d.bootID {
				c.Promised = nil
			}
			d.end(c)
		default:
			if err := d.adoptPages(c); err != nil {
				c.ShimAbsent = pagesLost
				d.dirty[c.Pod().Name] = true
				d.event(about(c, api.Event{Type: "pages-lost", Code: string(quota.CodePages), Message: fmt.Sprintf(
					"the shared pages of %s cannot be adopted (%v): its shim keeps the last limits, the other fences hold", c.Display(), err)}))
			}
			adopted++
			if c.State == registry.Running && c.Kill != nil && c.Kill.SentNS == 0 {
				d.redo = append(d.redo, redo(c))
			}
		}
	}
	d.removeStrays()
	for _, p := range reg.Pods() {
		d.publish(p)
	}
	d.event(api.Event{Type: "started", Message: fmt.Sprintf("gpufenced %s started with %d containers adopted", api.BuildVersion, adopted)})
	return d.saveDirty()
}

// endedMeanwhile says whether a container's cgroup is gone, or another one of the same name. An
// error is no proof of anything: housekeeping looks again.
func (d *Daemon) endedMeanwhile(c *registry.Container) bool {
	exists, err := d.host.Exists(*c.Cgroup)
	if err != nil {
		d.once("cgroup of "+string(c.ID()), err)
		return false
	}
	return !exists
}

// adoptPages opens a container's pages as they are: processes have them mounted. Without them the
// container goes on, held by the watch.
func (d *Daemon) adoptPages(c *registry.Container) error {
	if !c.Pages {
		return nil
	}
	p := c.Pod()
	rt := d.runtimeOf(p)
	if rt.pages == nil {
		pages, err := ledger.OpenPod(d.podDir(p), ledger.Options{Plain: d.plain})
		if err != nil {
			return err
		}
		rt.pages = pages
	}
	if _, err := os.Stat(filepath.Join(rt.pages.Dir(), "containers", c.Folder())); err != nil {
		return fmt.Errorf("find container's folder: %w", err)
	}
	page, err := rt.pages.AddContainer(c.Folder(), c.Index)
	if err != nil {
		return err
	}
	rt.containers[c.Index] = page
	view, err := page.Published()
	if err != nil {
		return err
	}
	// Numbers go on where they were: a slot's peak of an old number must not pass for a new one.
	rt.number = max(rt.number, view.Sample)
	d.sample = max(d.sample, view.Sample)
	return nil
}

// removeStrays removes folders that no pod of the registry has: left by a crash between making
// and saving them. Those of a damaged state file stay, since its containers still use them; they
// are told from strays by the file that was put aside.
func (d *Daemon) removeStrays() {
	names := map[string]bool{}
	for _, dir := range []string{"pods", "preload"} { // a crash may have come between the two
		entries, err := os.ReadDir(filepath.Join(d.cfg.RunDir, dir))
		if err != nil {
			d.once("strays", err)
			return
		}
		for _, e := range entries {
			names[e.Name()] = true
		}
	}
	for name := range names {
		if p := d.reg.Pod(name); p != nil && p.HasPages() {
			d.removeStrayContainers(p)
			continue
		}
		aside, err := filepath.Glob(filepath.Join(d.cfg.RunDir, "state", name+".json.damaged.*"))
		if err != nil || len(aside) > 0 {
			continue
		}
		dir := filepath.Join(d.cfg.RunDir, "pods", name)
		// CreatePod completes what a crash has left half made, so that it can be removed whole.
		pages, err := ledger.CreatePod(dir, ledger.Options{Plain: d.plain})
		if err == nil {
			err = pages.Remove()
		}
		if err == nil {
			err = os.RemoveAll(filepath.Join(d.cfg.RunDir, "preload", name))
		}
		d.once("stray "+name, err)
	}
}

func (d *Daemon) removeStrayContainers(p *registry.Pod) {
	rt := d.runtime[p.Name]
	if rt == nil || rt.pages == nil {
		return
	}
	names, err := rt.pages.Containers()
	if err != nil {
		d.once("strays of "+p.Name, err)
		return
	}
	known := map[string]bool{}
	for _, c := range p.Containers {
		known[c.Folder()] = known[c.Folder()] || c.Pages
	}
	for _, n := range names {
		if known[n] {
			continue
		}
		err := rt.pages.RemoveContainer(n)
		if e := os.Remove(filepath.Join(d.cfg.RunDir, "preload", p.Name, n)); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
		d.once("stray "+p.Name+"/"+n, err)
	}
}
