// SPDX-License-Identifier: Apache-2.0

// Package guesses lists what the simulated GPU guesses of the real one. Whatever records what a real
// GPU does goes by this list, so that no guess is forgotten and none is recorded that is not documented.
package guesses

import (
	"bytes"
	_ "embed" // the list
	"errors"
	"fmt"
	"regexp"

	"github.com/pelletier/go-toml/v2"
)

//go:embed guesses.toml
var list []byte

// Guess is one of them.
type Guess struct {
	ID    string `toml:"id"`
	Here  string `toml:"here"`  // what the simulated GPU does
	Check string `toml:"check"` // what to do on an idle GPU
	Needs string `toml:"needs"` // what a GPU alone does not have, or ""
}

var id = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)

// All gives them in the order of the list.
func All() ([]Guess, error) { return parse(list) }

func parse(text []byte) ([]Guess, error) {
	var file struct {
		Guess []Guess `toml:"guess"`
	}
	if err := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields().Decode(&file); err != nil {
		return nil, fmt.Errorf("read the list of guesses: %w", err)
	}
	var err error
	seen := map[string]bool{}
	for i, g := range file.Guess {
		if !id.MatchString(g.ID) {
			err = errors.Join(err, fmt.Errorf("read the list of guesses: number %d: id %q: want small letters, digits and hyphens", i+1, g.ID))
		}
		if seen[g.ID] {
			err = errors.Join(err, fmt.Errorf("read the list of guesses: %s is there twice", g.ID))
		}
		if g.Here == "" || g.Check == "" {
			err = errors.Join(err, fmt.Errorf("read the list of guesses: %s: what is done here, or how to check it, is missing", g.ID))
		}
		seen[g.ID] = true
	}
	if err != nil {
		return nil, err
	}
	return file.Guess, nil
}
