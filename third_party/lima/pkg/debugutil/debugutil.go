// SPDX-FileCopyrightText: Copyright The Lima Authors
// SPDX-License-Identifier: Apache-2.0

package debugutil

// Debug is set via main.
var Debug bool
