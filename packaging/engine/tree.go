// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// ReadTree reads a TOML file that need not be there: nil means that it is not; an empty one is an
// empty tree. What is no TOML is refused with its place and the hint mend.
func ReadTree(files Files, path, mend string) (map[string]any, error) {
	text, err := ReadOptional(files, path)
	if err != nil || text == nil {
		return nil, err
	}
	tree := map[string]any{}
	if err := toml.Unmarshal(text, &tree); err != nil {
		where := ""
		var derr *toml.DecodeError
		if errors.As(err, &derr) {
			row, column := derr.Position()
			where = fmt.Sprintf(" in line %d, column %d", row, column)
		}
		return nil, quota.NewError(quota.CodeEngineBroken, "%s is not TOML%s: %w", path, where, err).WithHint("%s", mend)
	}
	return tree, nil
}
