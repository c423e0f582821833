// SPDX-FileCopyrightText: Copyright The Lima Authors
// SPDX-License-Identifier: Apache-2.0

package uiutil

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// Confirm asks on the terminal for yes or no.
//
// Changed for agent-sessionizer: it asks without a library for terminals.
func Confirm(message string, defaultParam bool) (bool, error) {
	choice := "y/N"
	if defaultParam {
		choice = "Y/n"
	}
	fmt.Printf("? %s (%s) ", message, choice)
	answer, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return false, err
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "":
		return defaultParam, nil
	case "y", "yes":
		return true, nil
	}
	return false, nil
}
