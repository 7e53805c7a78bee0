// SPDX-License-Identifier: Apache-2.0

package main

import "strings"

// targets are the design's, by the name of a measurement and, where they differ, by its
// parameters (a part of them). The first that fits holds.
var targets = []struct {
	name, params string
	target
}{
	{"shim.pair", "10 blocks, 1 slot", target{150, "added"}},
	{"shim.pair", "10 blocks, 64 slots", target{1000, "added"}},
	{"shim.launch", "", target{5, "added"}},
	{"shim.first_use", "", target{1000, "with"}},
	{"shim.start", "", target{1.2, "ratio"}},
	{"shim.dlsym_miss", "", target{50, "added"}},
	{"watch.latency", "p99", target{150, "with"}},
	{"watch.neighbour_failures", "", target{0, "with"}},
	{"gpufenced.cpu", "", target{2, "with"}},
	{"gpufenced.memory", "", target{64, "with"}},
	{"runtime.create", "", target{15, "added"}},
	{"gate.ioctl", "unmanaged", target{30, "added"}},
	{"gate.ioctl", "charged", target{250, "added"}},
}

func targetOf(m measurement) *target {
	for _, t := range targets {
		if strings.HasPrefix(m.Name, t.name) && strings.Contains(m.Params, t.params) {
			return &t.target
		}
	}
	return nil
}
