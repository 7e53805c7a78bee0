// SPDX-License-Identifier: Apache-2.0

package release

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// Version is a version in the forms that its readers want it in.
type Version struct {
	Build   string // what the programs say, and the folder of their libraries: v0.3.0-5-g1a2b3c4
	Semver  string // the chart's: 0.3.0+5.g1a2b3c4
	Package string // dpkg's and rpm's: 0.3.0+5.g1a2b3c4, and 0.3.0~rc.1 for what comes before 0.3.0
	Tag     string // the image's, which may have no "+": 0.3.0_5.g1a2b3c4
}

var (
	described = regexp.MustCompile(`^v?(\d+\.\d+\.\d+)(?:-([0-9A-Za-z][0-9A-Za-z.]*?))??(?:-(\d+)-g([0-9a-f]+))?(-dirty)?$`)
	hash      = regexp.MustCompile(`^([0-9a-f]{7,40})(-dirty)?$`)
)

// ParseVersion understands what `git describe --tags --always --dirty` says. Where there is no tag yet
// versions are ordered by the time of their commit.
func ParseVersion(text string, commit time.Time) (Version, error) {
	v := Version{Build: text}
	var base, before string
	var after []string
	if m := described.FindStringSubmatch(text); m != nil {
		base, before = m[1], m[2]
		if m[3] != "" {
			after = append(after, m[3], "g"+m[4])
		}
		if m[5] != "" {
			after = append(after, "dirty")
		}
	} else if m := hash.FindStringSubmatch(text); m != nil {
		base, after = "0.0.0", []string{commit.UTC().Format("20060102150405"), "g" + m[1]}
		if m[2] != "" {
			after = append(after, "dirty")
		}
	} else {
		return Version{}, fmt.Errorf("read version: %q is neither 1.2.3, 1.2.3-rc.1 nor what git describe says: set VERSION", text)
	}
	v.Semver, v.Package = base, base
	if before != "" {
		v.Semver, v.Package = v.Semver+"-"+before, v.Package+"~"+before
	}
	if len(after) > 0 {
		rest := "+" + strings.Join(after, ".")
		v.Semver, v.Package = v.Semver+rest, v.Package+rest
	}
	v.Tag = strings.ReplaceAll(v.Semver, "+", "_")
	return v, nil
}
