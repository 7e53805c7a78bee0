// SPDX-License-Identifier: Apache-2.0

package act

// Unified is where the v2 hierarchy is mounted, "" where there is none.
func (h *Host) Unified() string { return h.mounts[unified] }

// UnifiedDir is the folder of a cgroup of the v2 hierarchy, "" for one of another.
func (h *Host) UnifiedDir(c Cgroup) string {
	if c.Hierarchy != unified {
		return ""
	}
	dir, err := h.dir(unified, c.Path)
	if err != nil {
		return "" // not mounted, or no path of a cgroup
	}
	return dir
}
