// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/api"
	"github.com/gpufence/gpufence/enforcer/quota"
)

// TestStubs: libraries that stand in for the driver's, and nothing preloaded.
func TestStubs(t *testing.T) {
	b := newBench(t)
	b.cfg.ShimDelivery = "stub"
	b.start()
	req := request("a", "memory.max=4Gi")
	_, err := b.d.Prepare(t.Context(), req)
	if api.ErrorOf(err).Code != string(quota.CodeShimMissing) || !strings.Contains(err.Error(), "libcuda.so.1 is not at") {
		t.Errorf("not installed: %v", err)
	}
	node, err := b.d.Node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range node.Fences {
		if f.Name == "shim" && f.State != "absent" {
			t.Errorf("the node's shim without them: %+v", f)
		}
	}
	folder := filepath.Join(filepath.Dir(b.cfg.ShimLibrary), "gpufence-stub")
	for _, place := range []string{"dev", "run"} {
		for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
			file := filepath.Join(folder, place, name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte("ELF"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	for dir, place := range map[string]string{"/dev/gpufence": "dev", "/run/gpufence-shim": "run"} {
		req := request("in-"+place, "memory.max=1Gi")
		req.ShimDir = dir
		over, pages := map[string]api.SharedFile{}, ""
		for _, f := range b.prepare(req).Files {
			if f.Destination == dir {
				pages = f.Source
			}
			if f.Over != "" {
				over[f.Over] = f
			} else if strings.Contains(f.Destination, "libgpufence") || strings.Contains(f.Destination, "preload") {
				t.Errorf("%s is mounted", f.Destination)
			}
		}
		for _, name := range []string{"libcuda", "libnvidia-ml"} {
			want := api.SharedFile{Source: filepath.Join(folder, place, name+".so.1"), Destination: dir + "/real/" + name + ".so.1", Over: name + ".so"}
			if got := over[name+".so"]; got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			if fi, err := os.Stat(filepath.Join(pages, "real", name+".so.1")); err != nil || !fi.Mode().IsRegular() {
				t.Errorf("nothing for %s to be mounted over: %v", name, err)
			}
		}
	}
	req = request("elsewhere", "memory.max=1Gi")
	req.ShimDir = "/opt/pages"
	if _, err := b.d.Prepare(t.Context(), req); api.ErrorOf(err).Code != string(quota.CodeShimMissing) {
		t.Errorf("elsewhere: %v", err)
	}
}
