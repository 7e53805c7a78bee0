// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// cursor is the last entry of the journal that was dealt with.
type cursor struct {
	file  string
	Seq   uint64 `json:"seq"`
	saved uint64
	at    time.Time // of the last save
}

func openCursor(dir string) (cursor, error) {
	c := cursor{file: filepath.Join(dir, "cursor.json")}
	text, err := os.ReadFile(c.file)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read cursor: %w", err)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		// Without it old entries are looked at once more: their Events have the same names.
		c.Seq = 0
	}
	c.saved = c.Seq
	return c, nil
}

// save writes it so that a crash leaves the old or the new one.
func (c cursor) save() error {
	text, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("save cursor: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(c.file), ".cursor-")
	if err != nil {
		return fmt.Errorf("save cursor: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), c.file)
	}
	if err != nil {
		_ = os.Remove(f.Name()) // it may be there half
		return fmt.Errorf("save cursor: %w", err)
	}
	return nil
}

// saveCursor writes what is not written yet.
func (a *Agent) saveCursor() error {
	a.mu.Lock()
	c := a.cursor
	a.mu.Unlock()
	if c.Seq == c.saved {
		return nil
	}
	if err := c.save(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.cursor.saved, a.cursor.at = c.Seq, a.opts.Now()
	return nil
}
