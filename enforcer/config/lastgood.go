// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// LastGoodName is the copy of the configuration that was last in force, in the state folder.
const LastGoodName = "config.last-good.toml"

// lastGoodHead begins the copy; the path of the original follows, so that a copy of one file
// never stands in for another.
const lastGoodHead = "# gpufence keeps this copy; it is what was last in force of "

// Loaded is a configuration and where it came from.
type Loaded struct {
	Config Config
	Path   string // of the file, also if it was missing or wrong
	Text   []byte // what the configuration was made of
	// FileErr is why the copy that was kept is used instead of the file; nil if it is not.
	FileErr *quota.Error
}

// LoadFile reads a configuration file as [Load] does, and keeps its text.
func LoadFile(path string) (Loaded, error) {
	l := Loaded{Path: path}
	if path == "" {
		l.Path = DefaultPath
	}
	text, err := read(l.Path)
	switch {
	case err == nil:
		l.Text = text
		l.Config, err = Parse(l.Path, text)
		return l, err
	case path == "" && errors.Is(err, fs.ErrNotExist):
		l.Config = Default()
		return l, nil
	}
	if e := (*quota.Error)(nil); errors.As(err, &e) {
		return l, e
	}
	return l, quota.NewError(quota.CodePolicyUnread, "cannot read the configuration: %w", err)
}

// LoadOrLastGood is [LoadFile], and where the file is wrong, what was last in force of it, if that
// was kept in the state folder (empty: the default one). Without a copy the file's error is
// returned.
func LoadOrLastGood(path, stateDir string) (Loaded, error) {
	l, err := LoadFile(path)
	if err == nil {
		return l, nil
	}
	if stateDir == "" {
		stateDir = Default().StateDir
	}
	copied := filepath.Join(stateDir, LastGoodName)
	text, readErr := read(copied)
	if readErr != nil {
		return l, err
	}
	head, body, _ := bytes.Cut(text, []byte("\n"))
	if string(head) != lastGoodHead+quota.Quote(l.Path) {
		return l, err
	}
	cfg, parseErr := Parse(copied, body)
	if parseErr != nil {
		return l, err // a copy of a later version; the file's error is what can be mended
	}
	errors.As(err, &l.FileErr)
	if l.FileErr == nil {
		l.FileErr = quota.NewError(quota.CodePolicyUnread, "%w", err)
	}
	l.Config, l.Text = cfg, body
	return l, nil
}

// SaveLastGood keeps what is in force. It is written beside and renamed, so that a crash leaves
// the old copy or the new one.
func SaveLastGood(stateDir string, l Loaded) error {
	if strings.ContainsAny(l.Path, "\n\r") {
		return fmt.Errorf("keep configuration: the path %.100q is not one line", l.Path)
	}
	text := append([]byte(lastGoodHead+quota.Quote(l.Path)+"\n"), l.Text...)
	path := filepath.Join(stateDir, LastGoodName)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
		return nil
	}
	f, err := os.CreateTemp(stateDir, "."+LastGoodName+".*")
	if err != nil {
		return fmt.Errorf("keep configuration: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("keep configuration: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// Reloaded is what a running gpufenced takes over of a new configuration, and the keys whose new
// values wait for its restart. Everything else holds at once.
func Reloaded(running, fresh Config) (Config, []string) {
	var wait []string
	for _, k := range []struct {
		key       string
		from, was *string
	}{
		{"socket", &fresh.Socket, &running.Socket},
		{"run-dir", &fresh.RunDir, &running.RunDir},
		{"state-dir", &fresh.StateDir, &running.StateDir},
		{"nvml-library", &fresh.NVMLLibrary, &running.NVMLLibrary},
		{"dmem-dir", &fresh.DmemDir, &running.DmemDir},
		{"gate", &fresh.Gate, &running.Gate},
		{"gate-pins", &fresh.GatePins, &running.GatePins},
		{"gate-managed", &fresh.GateManaged, &running.GateManaged},
		{"metrics-address", &fresh.MetricsAddress, &running.MetricsAddress},
	} {
		if *k.from != *k.was {
			wait = append(wait, k.key)
			*k.from = *k.was
		}
	}
	if fresh.GateStrict != running.GateStrict {
		wait = append(wait, "gate-strict")
		fresh.GateStrict = running.GateStrict
	}
	return fresh, wait
}
