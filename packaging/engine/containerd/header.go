// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"fmt"
	"strings"

	"github.com/gpufence/gpufence/packaging/engine"
	"github.com/gpufence/gpufence/packaging/engine/tomltext"
)

// header is what our file remembers of what we did to the main file, so that uninstall undoes
// that and nothing else.
type header struct {
	config  string // "": nothing
	pattern string
	added   tomltext.Added
	created bool
}

const headerPrefix = "# Done to "

// String is one comment line, or nothing.
func (h header) String() string {
	if h.config == "" || h.added == (tomltext.Added{}) && !h.created {
		return ""
	}
	var did []string
	for word, was := range map[string]bool{"created": h.created, "version": h.added.Version, "list": h.added.List, "import": h.added.Element} {
		if was {
			did = append(did, word)
		}
	}
	return fmt.Sprintf("%s%q: %s %q\n", headerPrefix, h.config, strings.Join(sorted(did), "+"), h.pattern)
}

func sorted(words []string) []string {
	var out []string
	for _, w := range []string{"created", "version", "list", "import"} {
		for _, have := range words {
			if have == w {
				out = append(out, w)
			}
		}
	}
	return out
}

// headerOf reads the line back; a file without it, or that is not ours, has none.
func headerOf(text []byte) header {
	rest, ours := strings.CutPrefix(string(text), engine.Header)
	if !ours || !strings.HasPrefix(rest, headerPrefix) {
		return header{}
	}
	line, _, _ := strings.Cut(strings.TrimPrefix(rest, headerPrefix), "\n")
	var h header
	var did string
	if n, err := fmt.Sscanf(strings.Replace(line, `": `, `" `, 1), "%q %s %q", &h.config, &did, &h.pattern); err != nil || n != 3 {
		return header{}
	}
	for _, word := range strings.Split(did, "+") {
		switch word {
		case "created":
			h.created = true
		case "version":
			h.added.Version = true
		case "list":
			h.added.List = true
		case "import":
			h.added.Element = true
		}
	}
	return h
}
