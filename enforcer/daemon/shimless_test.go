// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
)

// A GPU process that no shim sees is an event of its container, once.
func TestShimAbsentIsSaid(t *testing.T) {
	b := newBench(t)
	b.start()
	req := request("a", "memory.max=4Gi")
	req.ShimAbsent = "musl"
	p := b.run(req)
	b.samples(3)
	if evs := b.events("shim-absent"); len(evs) != 0 {
		t.Errorf("it uses no GPU yet: %+v", evs)
	}
	b.gpu.set(p.pid, gib)
	b.eventually("it is said", func() bool { return len(b.events("shim-absent")) > 0 })
	b.samples(5)
	evs := b.events("shim-absent")
	if len(evs) != 1 || evs[0].Pod == nil || evs[0].Name != "main" || !strings.Contains(evs[0].Message, "musl") || evs[0].Numbers["pid"] != uint64(p.pid) {
		t.Errorf("%+v", evs)
	}
	if i := slices.IndexFunc(b.view("a").Fences, func(f api.Fence) bool { return f.Name == "shim" && f.State == "absent" }); i < 0 {
		t.Errorf("%+v", b.view("a").Fences)
	}
}
