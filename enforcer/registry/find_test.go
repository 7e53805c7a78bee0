// SPDX-License-Identifier: Apache-2.0

package registry

import "testing"

// TestFindInNamespace: a pod that ended is not answered for by one of that name in another namespace.
func TestFindInNamespace(t *testing.T) {
	r := New()
	ended := put(t, r, "aaaa", "web", "main", Ended)
	running := put(t, r, "bbbb", "web2", "main", Running)
	running.Pod().Ref.Namespace, running.Pod().Ref.Name = "other", "web"
	if c, err := r.Find("web"); err != nil || c != running {
		t.Errorf("web: %v, %v", c, err)
	}
	for _, name := range []string{"ns/web", "ns/web/main"} {
		if c, err := r.Find(name); err != nil || c != ended {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}
