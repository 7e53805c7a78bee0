// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// Specs are the specifications in some folders. They are parsed again only when one was written, replaced
// or removed: NVIDIA's are thousands of lines of YAML, and who starts a container waits for that.
// It is not safe for concurrent use.
type Specs struct {
	state string
	cache *cdi.Cache
	now   func() time.Time // time.Now if nil
}

// young is what was changed so shortly ago that another change could bear the same time.
const young = time.Second

// Read is what the folders hold now.
func (s *Specs) Read(dirs []string) (*cdi.Cache, error) {
	state, newest := stateOf(dirs)
	if s.cache != nil && s.state == state {
		return s.cache, nil
	}
	s.cache = nil
	// No watcher: it would be told of a change after whoever asks because of it.
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(false))
	if err != nil {
		return nil, err
	}
	now := time.Now
	if s.now != nil {
		now = s.now
	}
	// What could not be read may be readable the next time, and be the same.
	if len(cache.GetErrors()) == 0 && now().Sub(newest) > young {
		s.state, s.cache = state, cache
	}
	return cache, nil
}

// State is another one when a specification in the folders was written, replaced or removed since.
func State(dirs []string) string {
	state, _ := stateOf(dirs)
	return state
}

// stateOf has the time of the newest change, too.
func stateOf(dirs []string) (state string, newest time.Time) {
	var b strings.Builder
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			fmt.Fprintf(&b, "%s: %v\n", dir, err)
			continue
		}
		for _, e := range entries {
			file := filepath.Join(dir, e.Name())
			var st unix.Stat_t
			if err := unix.Stat(file, &st); err != nil {
				fmt.Fprintf(&b, "%s: %v\n", file, err)
				continue
			}
			if changed := time.Unix(st.Ctim.Unix()); changed.After(newest) {
				newest = changed
			}
			fmt.Fprintf(&b, "%s: %d:%d, %d bytes, %v, %v\n", file, st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim)
		}
	}
	return b.String(), newest
}
