/* SPDX-License-Identifier: Apache-2.0 */
int toy(void);
int toy_by_version(void);
int toy(void) { return 42; }
int toy_by_version(void) { return 43; }
