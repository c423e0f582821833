// SPDX-FileCopyrightText: Copyright The Lima Authors
// SPDX-License-Identifier: Apache-2.0

package yqutil

import (
	"bytes"
	"errors"
	"io"

	"go.yaml.in/yaml/v3"
)

// ValidateContent decodes the content yaml, to check it for syntax errors.
//
// Changed for agent-sessionizer: it uses the parser that yq uses, instead of yq.
func ValidateContent(content []byte) error {
	for { // like yq, ignore directives at the beginning, which the parser does not know
		line, rest, more := bytes.Cut(content, []byte("\n"))
		line = bytes.TrimSpace(line)
		if !more || len(line) > 0 && line[0] != '#' && !bytes.HasPrefix(line, []byte("%YA")) {
			break
		}
		content = rest
	}
	var node yaml.Node
	err := yaml.NewDecoder(bytes.NewReader(content)).Decode(&node)
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
