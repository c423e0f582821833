// SPDX-FileCopyrightText: Copyright The Lima Authors
// SPDX-License-Identifier: Apache-2.0

package version

// Version is filled on compilation time.
var Version = "<unknown>"
