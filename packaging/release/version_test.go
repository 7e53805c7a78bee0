// SPDX-License-Identifier: Apache-2.0

package release

import (
	"testing"
	"time"
)

func TestParseVersion(t *testing.T) {
	commit := time.Date(2026, 12, 1, 4, 5, 6, 0, time.FixedZone("", 3600))
	for _, c := range []struct{ text, semver, pkg, tag string }{
		{"v0.3.0", "0.3.0", "0.3.0", "0.3.0"},
		{"0.3.0", "0.3.0", "0.3.0", "0.3.0"},
		{"v0.3.0-rc.1", "0.3.0-rc.1", "0.3.0~rc.1", "0.3.0-rc.1"},
		{"v0.3.0-5-g1a2b3c4", "0.3.0+5.g1a2b3c4", "0.3.0+5.g1a2b3c4", "0.3.0_5.g1a2b3c4"},
		{"v0.3.0-5-g1a2b3c4-dirty", "0.3.0+5.g1a2b3c4.dirty", "0.3.0+5.g1a2b3c4.dirty", "0.3.0_5.g1a2b3c4.dirty"},
		{"v0.3.0-dirty", "0.3.0+dirty", "0.3.0+dirty", "0.3.0_dirty"},
		{"v0.3.0-rc.1-5-g1a2b3c4", "0.3.0-rc.1+5.g1a2b3c4", "0.3.0~rc.1+5.g1a2b3c4", "0.3.0-rc.1_5.g1a2b3c4"},
		{"1a2b3c4", "0.0.0+20261201030506.g1a2b3c4", "0.0.0+20261201030506.g1a2b3c4", "0.0.0_20261201030506.g1a2b3c4"},
		{"1a2b3c4-dirty", "0.0.0+20261201030506.g1a2b3c4.dirty", "0.0.0+20261201030506.g1a2b3c4.dirty", "0.0.0_20261201030506.g1a2b3c4.dirty"},
	} {
		v, err := ParseVersion(c.text, commit)
		if err != nil {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		if want := (Version{Build: c.text, Semver: c.semver, Package: c.pkg, Tag: c.tag}); v != want {
			t.Errorf("%s: %+v, want %+v", c.text, v, want)
		}
	}
	for _, text := range []string{"", "unknown", "v1", "1.2", "1.2.3.4", "1.2.3/..", "../1.2.3", "v1.2.3-", "xyz1234", "1.2.3 4", "1.2.3+4"} {
		if v, err := ParseVersion(text, commit); err == nil {
			t.Errorf("%q was read as %+v", text, v)
		}
	}
}
