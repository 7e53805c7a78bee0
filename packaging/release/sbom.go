// SPDX-License-Identifier: Apache-2.0

package release

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// Shipped is a program or library that is handed out.
type Shipped struct {
	Name    string // its path where it is installed
	File    string // on this machine
	Library bool
	Modules []Module // linked into it; none of a C library
}

// SBOM lists in CycloneDX's JSON what is handed out, with checksums, and what is linked into it, with
// licences. Serial number and time follow from the contents and the commit.
func SBOM(name string, v Version, arch, goVersion string, all []Shipped, at time.Time) ([]byte, error) {
	bom := cdx.NewBOM()
	root := cdx.Component{BOMRef: "pkg:github/gpufence/gpufence@" + v.Semver + "?arch=" + arch, Type: cdx.ComponentTypeApplication, Name: name, Version: v.Semver, Licenses: licences("Apache-2.0")}
	bom.Metadata = &cdx.Metadata{
		Timestamp: at.UTC().Format(time.RFC3339), Component: &root,
		Properties: &[]cdx.Property{{Name: "gpufence:build-version", Value: v.Build}, {Name: "gpufence:go-version", Value: goVersion}},
	}
	var components []cdx.Component
	var depends []cdx.Dependency
	var top []string
	seen := map[string]bool{}
	sum := sha256.New()
	for _, s := range all {
		data, err := os.ReadFile(s.File)
		if err != nil {
			return nil, fmt.Errorf("write SBOM: %w", err)
		}
		of := sha256.Sum256(data)
		sum.Write(of[:])
		ref := "file:" + s.Name
		c := cdx.Component{
			BOMRef: ref, Type: cdx.ComponentTypeApplication, Name: path.Base(s.Name), Version: v.Semver, Licenses: licences("Apache-2.0"),
			Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(of[:])}},
			Properties: &[]cdx.Property{{Name: "gpufence:path", Value: s.Name}},
		}
		if s.Library {
			c.Type = cdx.ComponentTypeLibrary
		}
		components, top = append(components, c), append(top, ref)
		var linked []string
		for _, m := range s.Modules {
			purl := "pkg:golang/" + m.Path + "@" + m.Version
			linked = append(linked, purl)
			if seen[purl] {
				continue
			}
			seen[purl] = true
			c := cdx.Component{BOMRef: purl, PackageURL: purl, Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, Licenses: licences(m.ids()...)}
			if h1, ok := strings.CutPrefix(m.Sum, "h1:"); ok {
				raw, err := base64.StdEncoding.DecodeString(h1)
				if err != nil {
					return nil, fmt.Errorf("write SBOM: checksum of %s: %w", m.Path, err)
				}
				c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
			}
			components = append(components, c)
		}
		slices.Sort(linked)
		depends = append(depends, cdx.Dependency{Ref: ref, Dependencies: &linked})
	}
	slices.SortFunc(components, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	depends = append([]cdx.Dependency{{Ref: root.BOMRef, Dependencies: &top}}, depends...)
	bom.Components, bom.Dependencies = &components, &depends
	id := sum.Sum([]byte(nil))[:16]
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80 // a UUID of version 8: made of what we choose
	bom.SerialNumber = fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	var out bytes.Buffer
	if err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return nil, fmt.Errorf("write SBOM: %w", err)
	}
	return out.Bytes(), nil
}

func licences(ids ...string) *cdx.Licenses {
	if len(ids) == 1 && !strings.Contains(ids[0], " ") {
		return &cdx.Licenses{{License: &cdx.License{ID: ids[0]}}}
	}
	return &cdx.Licenses{{Expression: strings.Join(ids, " AND ")}}
}
