// SPDX-FileCopyrightText: Copyright The Lima Authors
// SPDX-License-Identifier: Apache-2.0

package api

type Info struct {
	SSHLocalPort int `json:"sshLocalPort,omitempty"`
}
